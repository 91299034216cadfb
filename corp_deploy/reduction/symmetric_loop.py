"""The published closed loop (GRAIL, section 3.2): every site's statistics are taken on the model as reduced so far.

A site is to do on the reduced stream what its dense weights would do there; the dense model's own stream is not looked
at, and nothing is fitted to it (closed_loop.py does both).
"""

from collections.abc import Callable
from functools import partial

import torch

from calib.hooks import evaluating
from calib.images import Images
from corp_deploy.families import timm_vit as vit
from corp_deploy.families.widths import HeadWidths, Widths
from ground.errors import BadInput

from .branch_sums import attention_moments, mlp_sums
from .coverage import coverage
from .method import Method
from .model import Reduction, notes_on, uniform_widths
from .rebuilt_branch import Rebuilt, rebuilt_attention, rebuilt_mlp
from .report import as_allocated
from .streams import Streams


def _rebuilt(
    branch: vit.Branch, part: vit.ChannelSite | vit.HeadSite, streams: Streams, method: Method, width: object
) -> Rebuilt:
    if isinstance(part, vit.HeadSite):
        assert isinstance(width, HeadWidths), (part.name, width)
        moments = attention_moments(branch, part, streams, system=method.needs_attention_system)
        return rebuilt_attention(part, moments, method, width)
    assert isinstance(width, int), (part.name, width)
    hidden, _ = mlp_sums(branch, part, streams)
    return rebuilt_mlp(branch, part, hidden, streams, method, width)


@torch.no_grad()
def reduce_symmetric_loop(
    model: torch.nn.Module,
    images: Images,
    method: Method,
    *,
    widths: Widths | None = None,
    batch_size: int = 32,
    done: Callable[[int], None] | None = None,
) -> Reduction:
    """A new model with the widths asked for, block by block; arguments as in reduce_closed_loop.

    Raises BadInput for a block that can't be walked through.
    """
    found = vit.sites(model)
    parts = {part.name: part for part in found.every}
    wanted = uniform_widths(model, method) if widths is None else widths
    steps = list(vit.steps(model))
    if whole := wanted.keys() - {step.name for step in steps if isinstance(step, vit.Branch)}:
        raise BadInput(f"closed loop: {', '.join(sorted(whole))} stand in blocks that can't be taken apart")
    rebuilt: list[Rebuilt] = []
    with evaluating(model):
        embedded = (vit.embedded(model, batch.to(vit.device(model))) for batch in images.batches(batch_size))
        streams = Streams(embedded, held_out_every=1)  # one stream, and no fit for which an image is held out
        for step in steps:
            if not isinstance(step, vit.Branch):
                streams.advance(step)
                continue
            layer = step.layer
            if step.name in wanted:
                rebuilt.append(_rebuilt(step, parts[step.name], streams, method, wanted[step.name]))
                layer = rebuilt[-1].layer
                if done is not None:
                    done(len(rebuilt))
            streams.advance(partial(step.through, layer))
    reports = [report for each in rebuilt for report in each.reports]
    modules = {name: module for each in rebuilt for name, module in each.modules.items()}
    return Reduction(
        model=vit.replaced(model, modules).eval().requires_grad_(False),
        method=method,
        sites=tuple(reports if widths is None else as_allocated(reports)),
        coverage=coverage(found, method, wanted, by_site=widths is not None),
        notes=notes_on(found, method, wanted),
        said=("symmetric closed loop: every site is fitted to its dense weights on the model as reduced so far",),
    )
