"""Redundancy planted in timm's models, which both ways of reducing remove at no loss; budgets over their sites."""

import pytest
import torch
from torch import Tensor

from corp_deploy.families.counting import macs
from corp_deploy.families.family import sites_of
from corp_deploy.families.inspection import inspection_of_model
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.budget_planner import build_budget_planner
from corp_deploy.planning.request import ReductionRequest
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.model import reduce, uniform_widths
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.traced.models.pairs import TracedPairs
from corp_deploy.traced.models.sites import Site
from corp_deploy.traced.models.values import TracedValues
from tests.small_models import error
from tests.timm_models import (
    BIASED,
    EVAS,
    HIERARCHIES,
    TURNED,
    VITS,
    checkpoint,
    library,
    method,
    moments,
    numbered,
    of_state,
    opened,
    pixels,
)


def mix(count: int) -> Tensor:
    return torch.randn(count, count, generator=torch.Generator().manual_seed(2)) / count**0.5


@torch.no_grad()
def plant_(site: Site) -> None:
    """The later half of the groups, of each head or part, are mixes of the first half where they may be mixed, copies
    where not; of planes that positions turn, which are no others' copies, queries are 0.
    """
    if isinstance(site, TracedPairs) and site.repair.mixing == "none":
        return
    if isinstance(site, TracedPairs) and site.repair.mixing == "planes":
        side, planes = site.repair.sides[0], site.dims // 2
        rows = torch.cat([each[..., planes // 2 :] for each in side.rows_HTD.split(planes, -1)], -1)
        for name in (side.weight, side.bias):
            site.program.tensor(name)[rows.flatten()] = 0.0
        return
    groups_HP, half = _parts(site), _parts(site).shape[1] // 2
    spans = (*site.groups.writers, *site.groups.between)
    may_be_mixed = isinstance(site, TracedPairs) or (isinstance(site, TracedValues) and site.rows is not None)
    is_mixed = may_be_mixed and not any("running" in span.name for span in spans)
    for span in spans:
        weight = site.program.tensor(span.name).movedim(span.axes[0], 0)
        rows_HPM = torch.from_numpy(span.index_GM)[groups_HP]
        first = weight[rows_HPM[:, :half]]
        later = torch.einsum("de,he...->hd...", mix(half), first) if is_mixed else first
        weight[rows_HPM[:, half : 2 * half]] = later


def _parts(site: Site) -> Tensor:
    if isinstance(site, TracedPairs):
        return site.groups_HP
    if isinstance(site, TracedValues):
        return site.groups_HV
    part_G = torch.zeros(site.width) if site.groups.part_G is None else torch.as_tensor(site.groups.part_G)
    return part_G.argsort(stable=True).view(site.parts, -1)


def planted(form: str) -> Checkpoint:
    """Biases that a program joins with others, or with zeros, are 0 beside what is mixed, copied beside copies."""
    state = {name: tensor.clone() for name, tensor in library(form).state_dict().items()}
    for name, tensor in state.items():
        if name.endswith("mlp_bias"):
            tensor[len(tensor) // 2 :] = tensor[: len(tensor) // 2]
        elif name.endswith((".q_bias", ".v_bias")):
            by_head = tensor.view(-1, 16)
            if form in TURNED and name.endswith(".q_bias"):
                by_head[:, [*range(4, 8), *range(12, 16)] if form.startswith("halves") else range(8, 16)] = 0.0
            else:
                by_head[:, 8:] = by_head[:, :8] @ mix(8).T
    own = of_state(form, state)
    for site in sites_of(own.model).every:
        if site.kind != "traced streams":
            plant_(site)
    return of_state(form, own.model.state_dict())  # what was found of other weights is forgotten


PLANTED = {
    **dict.fromkeys(VITS, 24), **dict.fromkeys(EVAS, 48), **dict.fromkeys(BIASED, 32), **dict.fromkeys(HIERARCHIES, 80),
    "gate behind a norm": 192, "attention pool": 384, "turned, attention pool": 384,
}  # fmt: skip
"""By how many images: a stem of convolutions leaves few tokens of such small ones, a pool of attention one."""
LEFT = {
    **dict.fromkeys(EVAS, 0.75), **dict.fromkeys(BIASED, 0.85), "turned, norms inside": 0.95,
    "turned, attention pool": 1.0,
}  # fmt: skip
"""Of the MACs at most."""


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", numbered(form for form in PLANTED if form != "talking heads"))
def test_planted_redundancy_is_removed_without_loss(form: str) -> None:
    """`best` at half the width everywhere; without a repair it is a loss."""
    dense = planted(form)
    # EfficientFormer's values are four times as wide as its queries.
    asked = method(geometry="padded" if form.startswith("efficientformer") else "square")
    images, others = opened(dense.model, PLANTED[form]), pixels(dense.model, 8, seed=5)
    taken, wanted = calibrate(dense, images, batch_size=8), uniform_widths(dense.model, asked)
    for done in (reduce(dense.model, taken, asked), reduce_traced(dense.model, images, asked, loop=Loop())):
        assert macs(done.model) < LEFT.get(form, 1.0) * macs(dense.model)
        assert error(done.model, dense.model, others) < 1e-3
        widths = {name: site.width for name, site in sites_of(done.model).by_name.items()}
        for name in wanted if form in HIERARCHIES else ():
            assert widths[name] < sites_of(dense.model).by_name[name].width or widths[name] == 8, name
    lost = error(reduce(dense.model, taken, method("none")).model, dense.model, others)
    assert lost > (2e-2 if form in HIERARCHIES else 1e-2) or form == "turned, norms inside"  # only planes go that are 0


BUDGETS = (
    "attention pool", "q/k norm", "gate behind a norm", "gate apart", "side by side", "one layer for all, a difference",
    "turned, norms inside", "learned angles", "padding", "tables",
)  # fmt: skip
"""Forms whose budgets differ: of what no site owns, of how many sites, of how they stand."""


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", numbered(BUDGETS))
def test_budget_is_used_up_and_met(form: str) -> None:
    own, asked = checkpoint(form), method(mlp_sparsity=None, attention_sparsity=None, conv_sparsity=None)
    sited = sum(row["macs"] for row in inspection_of_model(own.model)["sites"])
    share = 1.0 - 0.2 * sited / macs(own.model)
    request = ReductionRequest(options=ReduceOptions(macs=share), method=asked)
    planner = build_budget_planner(own, moments(form), request, opened(own.model, 16))
    narrower = reduce(own.model, moments(form), asked, widths=planner.widths_at(share).widths).model
    assert share - 0.08 < macs(narrower) / macs(own.model) <= share < 1.0
