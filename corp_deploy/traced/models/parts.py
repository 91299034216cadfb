"""Parts of a traced model around one site, at any of its widths, to be timed alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx, nn

from corp_deploy.traced.finding.cuts import extract_between
from corp_deploy.traced.finding.product import count_node_macs
from corp_deploy.traced.narrowing.whole_removal import fill_empty_readers_
from corp_deploy.traced.programs.program import Program, sizes_at_one
from ground.ports import OutputPort, Port

from .mergeable import Mergeable, program_at_tokens
from .module import Tracing, input_spec, output_ports, tracing
from .narrowed_model import at_widths
from .offered import sites_by_segment, sites_of
from .segments import cost_signature_of
from .sites import Site

STREAM = OutputPort(name="stream", role="feature map")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Consecutive segments as a module with its ports; equal `cost_signature`s mean equal costs."""

    module: fx.GraphModule
    inputs: tuple[Port, ...]
    outputs: tuple[OutputPort, ...]
    cost_signature: str


def tokens_that_enter(model: nn.Module) -> dict[str, int]:
    """Return, by site, the number of tokens that enter its first segment; 0 in a model without tokens."""
    found, tokens = tracing(model).mergeable, dict[str, int]()
    all_tokens = found.tokens if isinstance(found, Mergeable) else 0
    for segment, inside in sites_by_segment(model).items():
        entering = int(sizes_at_one(segment.before)[1]) if segment.start.is_merged else all_tokens
        tokens = dict.fromkeys(inside, entering) | tokens
    return {site.name: tokens.get(site.name, all_tokens) for site in sites_of(model).every}


def _at_tokens(own: Tracing, module: fx.GraphModule, tokens: int) -> Program:
    assert isinstance(own.mergeable, Mergeable), own.mergeable
    return program_at_tokens(replace(own.program, graph=module), own.mergeable.protected, tokens)


def macs_at_tokens(model: nn.Module, name: str, tokens: Sequence[int]) -> list[int]:
    """Count a segment's multiply-adds at these numbers of tokens, by a polynomial of second degree as in attention."""
    own = tracing(model)
    (segment,) = (each for each in own.segments if each.name == name)
    all_tokens = int(sizes_at_one(segment.before)[1])
    last, before, first = (
        sum(map(count_node_macs, _at_tokens(own, segment.module, count).nodes))
        for count in (all_tokens, all_tokens - 1, all_tokens - 2)
    )
    slope, bend = last - before, last - 2 * before + first
    return [last - gone * slope + gone * (gone - 1) // 2 * bend for gone in (all_tokens - count for count in tokens)]


def build_part(model: nn.Module, site: Site, width: int, tokens: int | None = None) -> Part:
    """Build the part from the first to the last segment of a site, or the whole model if it has no segments.

    The site keeps the first groups of each of its parts; `tokens` enter, None for all. Raises BadInput if the site
    can't be as narrow, or if the part needs all tokens.
    """
    inside = [found.name for found, names in sites_by_segment(model).items() if site.name in names]
    own = tracing(model if width == site.width else at_widths(model, {site.name: width}))
    found = [each for each in own.segments if each.name in inside]
    before = found[0].before if found and found[0] is not own.segments[0] else None
    after = found[-1].after if found and (own.cut_outputs or found[-1] is not own.segments[-1]) else None
    module = extract_between(own.program, before, after)
    fill_empty_readers_(module)
    all_tokens = 0 if isinstance(own.mergeable, str) else own.mergeable.tokens
    is_stream = before is not None and sizes_at_one(before)[1:2] == (all_tokens,)
    if is_stream and tokens not in (None, all_tokens):
        module = _at_tokens(own, module, tokens).graph
    weight_names = [str(node.target) for node in module.graph.nodes if node.op == "get_attr"]
    touched = [weight_names.index(span.name) for span in site.groups.writers if span.name in weight_names]
    entering, *masks = (node for node in module.graph.nodes if node.op == "placeholder")
    stream = Port(name="entering", shape=sizes_at_one(entering)[1:])
    ports = (
        Port(name=each.name, shape=sizes_at_one(each)[1:], dtype=str(each.meta["val"].dtype).removeprefix("torch."))
        for each in masks
    )
    return Part(
        module=module,
        inputs=input_spec(model).ports if before is None else (stream, *ports),
        outputs=output_ports(model) if after is None else (STREAM,),
        cost_signature=f"{site.groups.kind} of {width} written by {touched}\n{cost_signature_of(module.graph, module)}",
    )
