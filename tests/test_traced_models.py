"""Modules as people write them: the sites of each, and narrowed modules beside dense ones."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from corp_deploy.traced.finding.choice import find_head_groups, jointly_narrowed
from corp_deploy.traced.finding.shares import compute_shares
from corp_deploy.traced.finding.site_groups import SiteGroups
from corp_deploy.traced.finding.sites import FoundSites, find_sites
from corp_deploy.traced.narrowing.proof import narrow, prove, relative_difference
from corp_deploy.traced.programs.readers import add_zero_biases_
from corp_deploy.traced.programs.tracing import trace
from tests import traced_models as own
from tests.refusals import rejects

Shape = tuple[int, ...]
TOKENS, MAP = (own.TOKENS, own.D), (3, 8, 8)
# By module: input shapes without the batch, and the kind, number of groups and number of parts of every site.
MODELS: dict[str, tuple[Callable[[], nn.Module], Sequence[Shape], list[tuple[str, int, int]]]] = {
    "encoder": (own.encoder, [TOKENS], [("queries and keys", 16, 2), ("values", 16, 2), ("channels", 32, 1)] * 2),
    "own attention": (
        own.OwnAttention,
        [TOKENS],
        [("queries and keys", 16, 2), ("values", 16, 2), ("channels", 16, 1)],
    ),
    "einsum": (own.EinsumAttention, [TOKENS], [("queries and keys", 16, 2), ("values", 16, 2)]),
    "grouped queries": (own.Grouped, [TOKENS], [("queries and keys", 8, 2), ("values", 8, 2)]),
    "rotary": (own.Rotary, [TOKENS], [("queries and keys", 8, 2), ("values", 16, 2)]),
    "relative": (own.Relative, [TOKENS], [("queries and keys", 16, 2), ("values", 16, 2)]),
    "masked": (own.Masked, [TOKENS], [("queries and keys", 12, 2), ("values", 12, 2)]),
    "decomposed positions": (own.Decomposed, [TOKENS], [("queries and keys", 8, 1), ("values", 16, 2)]),
    "gated": (own.Gated, [TOKENS], [("gated channels", 24, 1)]),
    "glu": (own.Glu, [TOKENS], [("gated channels", 24, 1)]),
    "U-Net": (own.UNet, [MAP], [("convolution channels", size, 1) for size in (8, 16, 8)]),
    "two inputs": (own.TwoInputs, [(4,), (5,)], [("stream", 12, 1)]),
    "twice": (own.Twice, [(4,)], [("channels", 12, 1)]),
    "squeezed": (own.Squeezed, [MAP], [("convolution channels", 16, 1), ("convolution channels", 4, 1)]),
    "stream": (
        own.ResBlocks,
        [MAP],
        [("stream", 8, 1), ("convolution channels", 6, 1), ("convolution channels", 6, 1)],
    ),
    "shuffled": (own.Shuffled, [MAP], [("convolution channels", 12, 3), ("convolution channels", 12, 3)]),
}


def found_of(name: str) -> tuple[nn.Module, FoundSites]:
    torch.manual_seed(0)
    build, shapes, _ = MODELS[name]
    model = build().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = torch.randn(module.num_features)
            module.running_var = torch.rand(module.num_features) + 0.5
    return model, find_sites(trace(model, inputs(shapes, 2)))


def inputs(shapes: Sequence[Shape], batch: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(batch, *shape) for shape in shapes)


def half(site: SiteGroups, seed: int = 0) -> list[int]:
    """Draw another half of the groups of every part."""
    parts = np.zeros(site.size, dtype=int) if site.part_G is None else site.part_G
    draw = np.random.default_rng(seed)
    kept: list[int] = []
    for part in range(site.parts):
        groups = np.flatnonzero(parts == part)
        kept += draw.permutation(groups)[: max(1, len(groups) // 2)].tolist()
    return kept


@pytest.mark.parametrize("name", MODELS)
def test_sites_match_the_module(name: str) -> None:
    _, found = found_of(name)
    assert [(site.kind, site.size, site.parts) for site in found.sites] == MODELS[name][2]
    assert len({site.key for site in found.sites}) == len(found.sites)
    assert not found.flow.unknown


@pytest.mark.parametrize("name", MODELS)
def test_narrowed_model_equals_the_dense_one_with_zeros(name: str) -> None:
    model, found = found_of(name)
    shapes = MODELS[name][1]
    given = prove(found, {site.key: half(site, place) for place, site in enumerate(found.sites)}, inputs(shapes, 3))
    assert given.unreduced == {}
    assert given.difference is not None
    assert given.difference < 1e-5
    assert given.module.state_dict().keys() <= model.state_dict().keys() | set(found.program.folded)
    counts = [sum(each.numel() for each in module.parameters()) for module in (given.module, model)]
    assert counts[0] < counts[1]
    nothing = torch.zeros(found.flow.groups.count, dtype=torch.bool)
    assert relative_difference(found, nothing, given.module, inputs(shapes, 2)) > 1e-3
    with torch.no_grad():
        for batch in (1, 2, 5):
            leaves = tree_leaves(given.module(*inputs(shapes, batch)))
            assert all(each.shape[0] == batch for each in leaves)
        x, whole = inputs(shapes, 4), narrow(found, {site.key: range(site.size) for site in found.sites}).module
        for one, other in zip(tree_leaves(model(*x)), tree_leaves(whole(*x)), strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
    assert torch.backends.mha.get_fastpath_enabled(), "the fast path is enabled again"


def test_queries_become_narrower_than_values() -> None:
    """The queries may be part of a fused layer, and each head keeps its own dimensions."""
    for name in ("rotary", "relative", "own attention"):
        _, found = found_of(name)
        (site,) = [site for site in found.sites if site.kind == "queries and keys"]
        given = prove(found, {site.key: half(site)}, inputs([TOKENS], 2))
        assert given.unreduced == {}, name
        assert given.difference is not None
        assert given.difference < 1e-5


def test_whole_heads_are_removed_with_queries_keys_and_values() -> None:
    for name in ("relative", "einsum", "grouped queries"):
        _, found = found_of(name)
        queries, values = found.sites
        others = find_head_groups(found, values)
        assert not isinstance(others, str)
        assert queries.part_G is not None
        assert {key: parts.tolist() for key, parts in others.items()} == {queries.key: queries.part_G.tolist()}
        kept = {site.key: np.flatnonzero(site.part_G == 1) for site in found.sites}
        assert jointly_narrowed(found, kept) == [[queries.key, values.key]]
        assert jointly_narrowed(found, {site.key: half(site) for site in found.sites}) == [[queries.key], [values.key]]
        given = prove(found, kept, inputs([TOKENS], 2))
        assert given.unreduced == {}, name
        assert given.difference is not None
        assert given.difference < 1e-5
        rejects("all of a head", narrow, found, {key: groups for key, groups in kept.items() if "values" in key})


def test_tied_weights_are_kept_with_a_reason() -> None:
    torch.manual_seed(0)
    model, x = own.Nano().eval(), torch.randint(0, 20, (2, own.TOKENS))
    found = find_sites(trace(model, (x,)))
    assert [site.kind for site in found.sites] == ["queries and keys", "values", "channels"]
    reasons = {stay.name: stay.reason for stay in found.stays}
    assert reasons["lm_head.weight"] == "layer_norm in attn.norm (LayerNorm) mixes it"
    given = prove(found, {site.key: half(site) for site in found.sites}, (x,))
    assert given.unreduced == {}


def test_site_reports_its_cost_and_its_hooks() -> None:
    _, found = found_of("gated")
    (site,) = found.sites
    assert (site.name, site.key) == ("gate", "gate gated channels")
    assert [(span.name, span.axes) for span in site.writers] == [
        ("gate.weight", (0,)),
        ("gate.bias", (0,)),
        ("up.weight", (0,)),
        ("up.bias", (0,)),
    ]
    assert [(span.name, span.axes, span.index_GM[:, 0].tolist()) for span in site.readers] == [
        ("down.weight", (1,), list(range(24)))
    ]
    assert [(span.reader, span.axes) for span in site.listening] == [("linear_2", (2,))]
    assert sum(found.costs.values()) == 24 * 3 * own.TOKENS * own.D


def test_impossible_widths_are_refused() -> None:
    _, found = found_of("einsum")
    first = found.sites[0].key
    for kept, words in (
        ({"none": [0]}, "no such site"),
        ({first: [99]}, "expected numbers from 0 to"),
        ({first: [0, 1, 8]}, "parts"),
    ):
        rejects(words, narrow, found, kept)


class _Kernel(nn.Module):
    """A convolution whose weight is a parameter of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.last = nn.Parameter(torch.randn(8, 3, 3, 3)), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.conv2d(x, self.kernel).relu().mean((2, 3)))


def test_renamed_weight_finds_its_bias() -> None:
    program = trace(_Kernel(), inputs([MAP], 2))
    assert add_zero_biases_(program) == ("kernel_bias",)
    torch.testing.assert_close(program.tensor("kernel_bias"), torch.zeros(8))


def test_model_on_meta_has_the_same_sites() -> None:
    _, found = found_of("rotary")
    with torch.device("meta"):
        program = trace(own.Rotary(), inputs([TOKENS], 2))
    again = find_sites(program)
    assert [site.key for site in again.sites] == [site.key for site in found.sites]
    assert narrow(again, {site.key: half(site) for site in again.sites}).unreduced == {}


class _Registers(nn.Module):
    """Patches with `count` register tokens in front, through one MLP."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.stem, self.registers = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.zeros(1, count, 8))
        self.fc1, self.fc2 = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.stem(images).flatten(2).mT
        tokens = torch.cat((self.registers.expand(len(patches), -1, -1), patches), dim=1)
        return tokens + self.fc2(nn.functional.gelu(self.fc1(tokens)))


def test_parameter_without_elements_costs_nothing() -> None:
    """DINOv3's configuration may ask for no register tokens, whose parameter is then empty."""
    analyses = [find_sites(trace(_Registers(count).eval(), (torch.zeros(2, 3, 8, 8),))) for count in (0, 2)]
    none, two = (compute_shares(each).parameters.alone for each in analyses)
    assert none == two == {site.key: 24 * 17 for site in analyses[0].sites}
