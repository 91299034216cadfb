"""What a site of a traced model stands in, at any of its widths, to be timed alone."""

from dataclasses import dataclass

from torch import fx, nn

from corp_deploy.traced.finding.cuts import between
from corp_deploy.traced.programs.program import sizes_at_one
from ground.ports import OutputPort, Port

from .traced_model import input_spec, output_ports, sites_by_segment, tracing
from .traced_narrowing import at_widths
from .traced_segments import outline_of
from .traced_site import TracedSite

STREAM = OutputPort(name="stream", role="feature map")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Segments of a program with what enters and leaves them; `outline`: the same for sites that stand alike in alike
    ones.
    """

    module: fx.GraphModule
    inputs: tuple[Port, ...]
    outputs: tuple[OutputPort, ...]
    outline: str


def part_of(model: nn.Module, site: TracedSite, width: int) -> Part:
    """From the first segment that the site stands in to the last one, all else whole; the model where no segments are
    known. The site has the first groups of each of its parts. Raises BadInput where it can't be narrower.
    """
    inside = [found.name for found, names in sites_by_segment(model).items() if site.name in names]
    own = tracing(model if width == site.width else at_widths(model, {site.name: width}))
    found = [each for each in own.segments if each.name in inside]
    before = found[0].before if found and found[0] is not own.segments[0] else None
    after = found[-1].after if found and (own.given or found[-1] is not own.segments[-1]) else None
    module = between(own.program, before, after)
    held = [str(node.target) for node in module.graph.nodes if node.op == "get_attr"]
    touched = [held.index(span.name) for span in site.groups.writers if span.name in held]
    shape = None if before is None else sizes_at_one(before)[1:]
    return Part(
        module=module,
        inputs=input_spec(model).ports if shape is None else (Port(name="entering", shape=shape),),
        outputs=output_ports(model) if after is None else (STREAM,),
        outline=f"{site.groups.kind} of {width} written by {touched}\n{outline_of(module.graph, module)}",
    )
