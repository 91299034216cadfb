"""The published closed loop (GRAIL, section 3.2): every site's statistics are taken on the model as reduced so far.

A site is to do on the reduced stream what its dense weights would do there; the dense model's own stream is not looked
at, and nothing is fitted to it (closed_loop.py does both).
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from calib.hooks import evaluating
from calib.input_set import InputSet
from corp_deploy.families.family import family_of
from corp_deploy.families.modules import replaced, with_modules
from corp_deploy.families.steps import Branch
from corp_deploy.families.widths import Widths
from ground.errors import BadInput

from .coverage import coverage
from .kind import Reduced
from .kinds import kind_of
from .method import Method
from .model import Reduction, notes_on, uniform_widths
from .report import as_allocated
from .rescaling import require_rescalable
from .streams import Streams, embedded


@torch.no_grad()
def reduce_symmetric_loop(
    model: torch.nn.Module,
    images: InputSet,
    method: Method,
    *,
    widths: Widths | None = None,
    batch_size: int = 32,
    done: Callable[[int], None] | None = None,
) -> Reduction:
    """A new model with the widths asked for, block by block; arguments as in reduce_closed_loop.

    Raises BadInput for a block that can't be walked through.
    """
    family = family_of(model)
    sites = family.sites(model)
    if method.rescales:
        require_rescalable(model, images)  # which a model that is walked through by branches never is
    asked = uniform_widths(model, method) if widths is None else widths
    steps = list(family.steps(model))
    if whole := asked.keys() - {step.name for step in steps}:
        raise BadInput(f"closed loop: {', '.join(sorted(whole))} stand in blocks that can't be taken apart")
    rebuilt: list[Reduced] = []
    with evaluating(model):
        # One stream, and no fit for which an image is held out.
        streams = Streams(embedded(model, images, batch_size), held_out_every=1)
        for step in steps:
            if isinstance(step, Branch) and step.name in asked:
                site = sites.by_name[step.name]
                new = kind_of(site).rebuilt(step, site, streams, method, asked[step.name])
                streams.advance(replace(step, layer=with_modules(step.layer, step.name, new.modules)))
                rebuilt.append(new)
                if done is not None:
                    done(len(rebuilt))
            else:
                streams.advance(step)
    reports = [report for each in rebuilt for report in each.reports]
    modules = {name: module for each in rebuilt for name, module in each.modules.items()}
    reduced = replaced(model, modules).eval().requires_grad_(False)
    return Reduction(
        model=reduced,
        method=method,
        sites=tuple(reports if widths is None else as_allocated(reports)),
        coverage=coverage(sites, method, asked, by_site=widths is not None),
        notes=notes_on(sites, method, asked),
        said=("symmetric closed loop: every site is fitted to its dense weights on the model as reduced so far",),
    )
