"""Token merging: the arithmetic against loops over tokens in float64, and merged models against their dense ones."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calib.moments import ChannelMoments, HeadMoments, Moments
from corp_deploy import load
from corp_deploy.algebra.regression import RegressionSums
from corp_deploy.families import traced_model
from corp_deploy.families.traced_model import with_merging
from corp_deploy.proof.structural_tests import measure_shift
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.moments import merging_note
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.merging import How, Merging, Metric, schedule_from_text
from corp_deploy.store.checkpoint import Checkpoint, save
from corp_deploy.traced.models.layers import build_layered_model
from corp_deploy.traced.models.module import TracedModule
from corp_deploy.traced.models.steps import Merge, StreamState
from corp_deploy.traced.models.token_merging import (
    Tokens,
    drop_tokens,
    key_bias,
    match_tokens,
    merge_tokens,
    sources_of,
    token_similarity,
    unmerge_tokens,
    ward,
)
from ground.errors import BadInput
from tests import timm_models, tiny
from tests.refusals import rejects
from tests.test_corp_closed_loop import best, opened
from tests.tiny import checkpoint, images

SHAPES = [(7, 1, 2), (8, 1, 3), (9, 0, 4), (16, 5, 5), (12, 2, 1)]


def stream(tokens: int, seed: int = 0, batch: int = 3, channels: int = 6) -> Tensor:
    return torch.randn(batch, tokens, channels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sizes_of(tokens: int, seed: int = 1, batch: int = 3) -> Tensor:
    return torch.randint(1, 6, (batch, tokens), generator=torch.Generator().manual_seed(seed)).float()


def by_cosine(compared_NX: Tensor, sizes_N: Tensor, one: int, other: int) -> float:
    return float(torch.cosine_similarity(compared_NX[one], compared_NX[other], dim=0))


def by_squares(compared_NX: Tensor, sizes_N: Tensor, one: int, other: int) -> float:
    """Less the sum of squares about the mean of both, of all that stand in them."""
    weights_2, both_2X = sizes_N[[one, other]].double(), compared_NX[[one, other]].double()
    mean_X = (weights_2[:, None] * both_2X).sum(dim=0) / weights_2.sum()
    return -float((weights_2 * (both_2X - mean_X).square().sum(dim=1)).sum())


def by_attended_squares(compared_NX: Tensor, sizes_N: Tensor, one: int, other: int) -> float:
    """With the class token's attention behind the stream's channels."""
    roots = compared_NX[one, -1].sqrt() + compared_NX[other, -1].sqrt()
    return by_squares(compared_NX[:, :-1], sizes_N, one, other) * float(roots)


BY = {"ward": by_squares, "attended": by_attended_squares, "stream": by_cosine, "keys": by_cosine}


def merged_by_loops(
    x_NC: Tensor, sizes_N: Tensor, compared_NX: Tensor, count: int, protected: int, by: Any = by_cosine
) -> tuple[Any, ...]:
    """The paper's section 3, one token at a time: stream, sizes, and where each token went."""
    free = list(range(protected, len(x_NC)))
    evens, odds = free[0::2], free[1::2]
    best = []
    for even in evens:
        to_odds = [by(compared_NX, sizes_N, even, odd) for odd in odds]
        best.append((max(to_odds), odds[to_odds.index(max(to_odds))]))
    order = sorted(range(len(evens)), key=lambda place: -best[place][0])
    into = {evens[place]: best[place][1] for place in order[:count]}
    stays = [*range(protected), *(even for even in evens if even not in into), *odds]
    rows, sizes = [], []
    for token in stays:
        members = [token, *(even for even in into if into[even] == token)]
        weights = torch.stack([sizes_N[member].double() for member in members])
        rows.append((weights[:, None] * x_NC[members]).sum(dim=0) / weights.sum())
        sizes.append(weights.sum())
    went = [stays.index(into.get(token, token)) for token in range(len(x_NC))]
    return torch.stack(rows), torch.stack(sizes), torch.tensor(went)


@pytest.mark.parametrize("metric", ["ward", "stream"])
@pytest.mark.parametrize(("tokens", "protected", "count"), SHAPES)
def test_merge_equals_explicit_loops(tokens: int, protected: int, count: int, metric: Metric) -> None:
    x_BNC, sizes_BN, compared_BNX = stream(tokens), sizes_of(tokens), stream(tokens, seed=2, channels=4)
    given = Tokens(x_BNC, sizes_BN, sources_of(x_BNC))
    got = merge_tokens(
        given, match_tokens(token_similarity(metric, x_BNC, compared_BNX, sizes_BN, protected), count), protected
    )
    assert got.sizes is not None
    assert got.sources is not None
    for image in range(len(x_BNC)):
        x_NC, sizes_N, went_N = merged_by_loops(
            x_BNC[image], sizes_BN[image], compared_BNX[image], count, protected, BY[metric]
        )
        # Shares are float32, as graphs have them.
        torch.testing.assert_close(got.x[image], x_NC, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got.sizes[image].double(), sizes_N)
        assert torch.equal(got.sources[image], went_N)
    assert torch.equal(got.x[:, :protected], x_BNC[:, :protected])


def test_common_component_of_tokens_does_not_affect_the_choice() -> None:
    x_BNC, sizes_BN = stream(21).float(), sizes_of(21)
    plain_BAD = ward(x_BNC, sizes_BN, 1)
    far_BAD = ward(x_BNC + 1000.0, sizes_BN, 1)
    torch.testing.assert_close(far_BAD, plain_BAD, rtol=2e-3, atol=2e-3)  # 1000 in float32 has four digits left
    assert torch.equal(match_tokens(far_BAD, 5).merged, match_tokens(plain_BAD, 5).merged)
    torch.testing.assert_close(ward(x_BNC, None, 1), ward(x_BNC, torch.ones(3, 21), 1))


@pytest.mark.parametrize("metric", ["ward", "stream"])
def test_planted_duplicates_are_merged_first_without_change(metric: Metric) -> None:
    x_BNC = stream(13)
    for even, odd in ((1, 4), (5, 2), (11, 12)):  # behind one protected token, odd numbers are the even places
        x_BNC[:, even] = x_BNC[:, odd]
    match = match_tokens(token_similarity(metric, x_BNC, x_BNC, sizes_of(13), 1), 3)
    assert [sorted(1 + 2 * place for place in row) for row in match.merged.tolist()] == [[1, 5, 11]] * 3
    got = merge_tokens(Tokens(x_BNC, sizes_of(13), sources_of(x_BNC)), match, 1)
    assert got.sources is not None
    torch.testing.assert_close(unmerge_tokens(got.x, got.sources), x_BNC, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("metric", ["ward", "stream"])
def test_ties_merge_the_first_token(metric: Metric) -> None:
    match = match_tokens(token_similarity(metric, torch.ones(2, 10, 3), torch.ones(2, 10, 3), None, 0), 2)
    assert match.merged.tolist() == [[0, 1]] * 2
    assert match.into.tolist() == [[0] * 5] * 2
    assert match.kept.tolist() == [[2, 3, 4]] * 2


def test_least_attended_tokens_are_dropped() -> None:
    x_BNC = stream(7, batch=1)
    attention_BN = torch.tensor([[0.0, 0.3, 0.1, 0.1, 0.2, 0.1, 0.2]])
    got = drop_tokens(Tokens(x_BNC, None, sources_of(x_BNC)), attention_BN, 2, 1)
    assert torch.equal(got.x, x_BNC[:, [0, 1, 4, 5, 6]])
    assert got.sizes is None
    assert got.sources is not None
    assert got.sources.tolist() == [[0, 1, -1, -1, 2, 3, 4]]
    again = drop_tokens(got, torch.tensor([[0.0, 0.1, 0.5, 0.4, 0.3]]), 1, 1)
    assert again.sources is not None
    assert again.sources.tolist() == [[0, -1, -1, -1, 1, 2, 3]]


@pytest.mark.parametrize(
    "options",
    [{"metric": "attended"}, {"metric": "keys"}, {"how": "drop"}, {"unmerged": True}],
)
def test_empty_schedule_equals_the_dense_model(options: Any) -> None:
    dense, x = checkpoint().model, torch.from_numpy(images(4))
    same = traced_model.with_merging(dense, Merging(schedule=(0, 0), **options))
    assert traced_model.merging_of(same) == Merging(schedule=(0, 0), **options)
    assert traced_model.merging_of(dense) is None
    assert same.state_dict().keys() == dense.state_dict().keys()
    with torch.inference_mode():
        assert torch.equal(same(x), dense(x))


def by_loops(
    model: nn.Module, x: Tensor, merging: Merging, see: Callable[[str, Tensor, Tensor], None] = lambda *_: None
) -> Tensor:
    """The merged model's outputs from the dense model's parts, image by image and token by token, in float64; what
    enters the last layers of attentions and MLPs is shown with the tokens' sizes.
    """
    vit: Any = model
    protected, outputs = vit.num_prefix_tokens, []
    for x_1NC in vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(x)))).split(1):
        x_NC, sizes_N, went_N = x_1NC[0], torch.ones(x_1NC.shape[1]), torch.arange(x_1NC.shape[1])
        for index, (block, count) in enumerate(zip(vit.blocks, merging.schedule, strict=True)):
            attention = block.attn
            q, k, v = attention.qkv(block.norm1(x_NC)).unflatten(-1, (3, attention.num_heads, -1)).unbind(1)
            heads = []
            for head in range(attention.num_heads):
                scores = q[:, head] @ k[:, head].T * attention.scale + sizes_N.double().log()
                heads.append(scores.softmax(-1) @ v[:, head])
            see(f"blocks.{index}.attn.proj", torch.cat(heads, dim=-1), sizes_N)
            x_NC = x_NC + block.ls1(attention.proj(torch.cat(heads, dim=-1)))
            if count:
                compared = k.flatten(1) if merging.metric == "keys" else x_NC
                if merging.metric == "attended":
                    of_first_HN = torch.einsum("hd,nhd->hn", q[0], k) * attention.scale
                    compared = torch.cat([x_NC, of_first_HN.softmax(-1).mean(0)[:, None]], dim=1)
                x_NC, sizes_N, went = merged_by_loops(x_NC, sizes_N, compared, count, protected, BY[merging.metric])
                went_N = went[went_N]
            hidden_NF = block.mlp.act(block.mlp.fc1(block.norm2(x_NC)))
            see(f"blocks.{index}.mlp.fc2", hidden_NF, sizes_N)
            x_NC = x_NC + block.ls2(block.mlp.fc2(hidden_NF))
        outputs.append(vit.forward_head(vit.norm(x_NC[went_N].unsqueeze(0))))
    return torch.cat(outputs)


@pytest.mark.parametrize(
    ("kwargs", "options"),
    [
        ({}, {}),
        ({}, {"metric": "keys"}),
        ({}, {"metric": "attended"}),
        ({"global_pool": "map", "class_token": False}, {}),
        ({"global_pool": "", "num_classes": 0}, {"unmerged": True}),
    ],
)
def test_merged_model_equals_explicit_loops(kwargs: dict[str, Any], options: Any) -> None:
    dense = checkpoint(depth=3, **kwargs).model
    merging = Merging(schedule=(3, 0, 4), **options)
    x = torch.from_numpy(images(3))
    with torch.inference_mode():
        got = traced_model.with_merging(dense, merging)(x)
        expected = by_loops(copy.deepcopy(dense).double(), x.double(), merging).float()
        assert got.shape == dense(x).shape
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_dropping_needs_a_class_token_and_is_not_undone() -> None:
    model = checkpoint(class_token=False, global_pool="avg").model
    for options in ({"how": "drop"}, {"metric": "attended"}):
        with pytest.raises(BadInput, match="needs a class token"):
            traced_model.with_merging(model, Merging(schedule=(1, 1), **options))  # type: ignore[arg-type]
    rejects("no value to restore", Merging, schedule=(1, 1), how="drop", unmerged=True)


ENTRIES: list[tuple[dict[str, Any], str]] = [
    ({"schedule": [3]}, "a schedule of 1 entries for 2 blocks"),
    ({"schedule": [3, 9]}, "block 1 has 14 tokens, 1 of them protected, so it can merge 6 at most, got 9"),
    ({"schedule": [3, -1]}, "merging.schedule"),
    ({"schedule": []}, "merging.schedule"),
    ({"metric": "values"}, "merging.metric"),
    ({"how": "drop", "unmerged": True}, "no value to restore"),
    ({"sizes": 3}, "merging"),
]


def test_merged_model_round_trips_and_invalid_entries_are_refused(tmp_path: Path) -> None:
    dense, merging = checkpoint(), Merging(schedule=(3, 4), metric="keys")
    model = traced_model.with_merging(dense.model, merging)
    save(Checkpoint(model=model, architecture=dense.architecture, lineage={}), tmp_path)
    loaded, x = load(tmp_path), torch.from_numpy(images(3))
    assert traced_model.merging_of(loaded) == merging
    with torch.inference_mode():
        assert torch.equal(loaded(x), model(x))
        plain = traced_model.with_merging(loaded, None)
        assert traced_model.merging_of(plain) is None
        assert torch.equal(plain(x), dense.model(x))
    written = json.loads((tmp_path / "config.json").read_text())
    for entry, message in ENTRIES:
        config = written | {"merging": written["merging"] | entry}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(BadInput, match=message) as refusal:
            load(tmp_path)
        assert "config.json" in str(refusal.value)


def test_schedules_are_parsed() -> None:
    assert schedule_from_text("12", 3) == (12, 12, 12)
    assert schedule_from_text("0,4,8", 3) == (0, 4, 8)
    assert schedule_from_text("grow:36", 12) == (0, 3, 7, 10, 13, 16, 20, 23, 26, 29, 33, 36)
    assert schedule_from_text("grow:5", 1) == (0,)
    for text in ("", "x", "1,2", "-1", "grow:", "1.5", "٣"):
        rejects("expected how many tokens", schedule_from_text, text, 3)


# Moments and closed loops of models that merge tokens: sums weighted by size, targets that are means of tokens


SCHEDULE = (3, 4)


@cache
def merged_tiny(how: How = "merge", **kwargs: Any) -> nn.Module:
    return with_merging(tiny.checkpoint(**kwargs).model, Merging(schedule=SCHEDULE, how=how))


def moments_of(model: nn.Module, images: np.ndarray) -> Moments:
    checkpoint = Checkpoint(model=model, architecture=tiny.ARCHITECTURE, lineage={})
    return calibrate(checkpoint, opened(model, images), batch_size=8)


def test_moments_weight_each_token_by_its_size() -> None:
    """Against sums of outer products of what enters the last layers, beside a 1, token by token."""
    expected = dict[str, Tensor]()

    def see(name: str, x_NF: Tensor, sizes_N: Tensor) -> None:
        rows = torch.cat([x_NF, torch.ones(len(x_NF), 1)], dim=1).double()
        outer = [size * torch.outer(x_F, x_F) for size, x_F in zip(sizes_N.double(), rows, strict=True)]
        expected[name] = expected.get(name, torch.zeros(())) + torch.stack(outer).sum(dim=0)

    pixels = tiny.images(9)
    with torch.no_grad():
        by_loops(tiny.checkpoint().model.double(), torch.from_numpy(pixels).double(), Merging(schedule=SCHEDULE), see)
    moments = moments_of(merged_tiny(), pixels).sites
    for name, sums in expected.items():
        own = moments[name]
        assert isinstance(own, ChannelMoments)
        assert own.tokens == pytest.approx(float(sums[-1, -1])) == 9 * 17
        assert tiny.relative(own.gram_FF, sums[:-1, :-1]) < 1e-5
        assert tiny.relative(own.sum_F, sums[:-1, -1]) < 1e-5
    first, dense = (sites["blocks.0.attn.qk"] for sites in (moments, moments_of(tiny.checkpoint().model, pixels).sites))
    assert isinstance(first, HeadMoments)
    assert isinstance(dense, HeadMoments)
    assert torch.equal(first.qq_HDD, dense.qq_HDD)


def test_moments_count_only_kept_tokens() -> None:
    moments = moments_of(merged_tiny("drop"), tiny.images(9))
    tokens = {name: sums.tokens for name, sums in moments.sites.items()}
    assert tokens == {
        "blocks.0.attn.qk": 153,
        "blocks.0.attn.proj": 153,
        "blocks.0.mlp.fc2": 126,
        "blocks.1.attn.qk": 126,
        "blocks.1.attn.proj": 126,
        "blocks.1.mlp.fc2": 90,
    }


def test_moments_record_the_merging() -> None:
    dense, merged = tiny.checkpoint().model, merged_tiny()
    with_merging = moments_of(merged, tiny.images(4))
    assert not merging_note(merged, with_merging)
    assert "while tokens were merged as" in merging_note(dense, with_merging)
    assert "without merged tokens" in merging_note(merged, moments_of(dense, tiny.images(4)))


def test_weighted_sums_equal_repeated_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    x_BNK, t_BNO = (torch.randn(2, 5, width, generator=generator) for width in (4, 3))
    weights_BN = torch.tensor([[1.0, 2.0, 1.0, 3.0, 1.0]] * 2)
    repeats = weights_BN[0].long()
    one, other = (RegressionSums.empty(inputs=4, outputs=3) for _ in range(2))
    one.add(x_BNK, t_BNO, weights_BN)
    other.add(x_BNK.repeat_interleave(repeats, dim=1), t_BNO.repeat_interleave(repeats, dim=1))
    assert one.x.tokens == other.x.tokens == 16
    for got, expected in ((one.x.gram_KK, other.x.gram_KK), (one.tx_OK, other.tx_OK), (one.t_O, other.t_O)):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.tt, other.tt, rtol=1e-5, atol=1e-5)


def test_images_are_compared_under_the_merging_of_the_moments() -> None:
    dense, pixels = tiny.checkpoint(), tiny.images(64)
    moments = moments_of(merged_tiny(), pixels)
    merged = measure_shift(dense, moments, {"images": pixels})
    plain = {key: text for key, text in moments.lineage.items() if key != "merging"}
    otherwise = measure_shift(dense, replace(moments, lineage=plain), {"images": pixels})
    assert merged is not None
    assert otherwise is not None
    assert max(site.mean_distance for site in merged.sites) < max(site.mean_distance for site in otherwise.sites)
    for text in ("{", "[]", '{"schedule": [], "metric": "stream", "how": "merge", "unmerged": false}'):
        with pytest.raises(BadInput, match="the moments' merging"):
            measure_shift(dense, replace(moments, lineage={**plain, "merging": text}), {"images": pixels})


# Token merging in traced models: steps and layers, loops, what is refused


FORMS: list[tuple[str, dict[str, Any]]] = [
    ("class token", {}),
    ("registers", {"metric": "attended"}),
    ("distilled", {"metric": "keys"}),
    ("mean", {"how": "drop"}),
    ("no pool", {"unmerged": True}),
]


@cache
def with_merged_tokens(form: str, **options: Any) -> nn.Module:
    return traced_model.with_merging(timm_models.checkpoint(form).model, Merging(schedule=SCHEDULE, **options))


def given_by(model: nn.Module, count: int = 5, seed: int = 0) -> Tensor:
    return tiny.ran(model, tiny.images(count, seed))


@pytest.mark.slow("models")
@pytest.mark.parametrize(("options", "left"), [({}, 0.9), ({"how": "drop"}, 0.96)])
def test_closed_loop_repairs_the_effect_of_merging(options: dict[str, Any], left: float) -> None:
    """At full width, on images of the fit: the dense model's outputs are nearer than without a repair."""
    model, dense = with_merged_tokens("mean", **options), timm_models.checkpoint("mean").model
    full = timm_models.method(mlp_sparsity=0.0, attention_sparsity=0.0)
    repaired = reduce_traced(model, timm_models.opened(model, 64, 1), full, loop=Loop()).model
    assert traced_model.merging_of(repaired) == traced_model.merging_of(model)
    expected = given_by(dense, 64, 1)
    before, after = (float((given_by(each, 64, 1) - expected).norm()) for each in (model, repaired))
    assert after < left * before


class _Positioned(nn.Module):
    """Two attentions, positions behind the first combined by other means than a sum or product."""

    input_size = (3, 16, 16)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 3)
        self.qkv = nn.ModuleList([nn.Linear(8, 24), nn.Linear(8, 24)])
        self.places = nn.Parameter(torch.randn(1, 16, 8))

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        for qkv in self.qkv:
            q, k, v = qkv(torch.maximum(x, self.places)).reshape(-1, 16, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
            x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 16, 8)
        return self.head(x.mean(1))


class _AcrossImages(nn.Module):
    """An attention of single numbers between the images of a batch, as timm's CSATv2 computes it."""

    input_size = (3, 16, 16)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Conv2d(3, 1, 4, 4), nn.Linear(1, 3), nn.Linear(16, 3)

    def forward(self, images: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(images).flatten(2).transpose(1, 2)).unbind(-1)
        return self.head((q @ k.transpose(0, 1)).softmax(-1) @ v)


NEEDING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "convnet": (lambda: timm.create_model("resnet10t"), "no attention of tokens is found"),
    "attention between images": (_AcrossImages, "no attention of tokens is found"),
    "positions behind the first block": (
        _Positioned,
        "maximum in the model takes a tensor with an entry for every token",
    ),
    "branches side by side": (lambda: timm_models.checkpoint("one layer for all").model, "other branches carry"),
}


@pytest.mark.parametrize("name", NEEDING)
def test_models_that_need_every_token_are_refused(name: str) -> None:
    make, reason = NEEDING[name]
    model = make().eval()
    if not isinstance(model, TracedModule):
        model = traced_model.trace_model(model, Architecture(name=name, family="module"))
    rejects(reason, traced_model.with_merging, model, Merging(schedule=(1, 1)))
    assert reason in traced_model.merging_refusal(model)


@pytest.mark.parametrize(("form", "options"), FORMS)
def test_cut_by_cut_evaluation_equals_the_model(form: str, options: dict[str, Any]) -> None:
    model, images = with_merged_tokens(form, **options), torch.from_numpy(tiny.images(5))
    with torch.inference_mode():
        walk = StreamState.of(traced_model.first_stream(model, images), None)
        for step in traced_model.steps(model):
            walk = walk.behind(step)
        (given,) = traced_model.outputs_of_walk(model, walk, images)
        pieces, layers = build_layered_model(model)
        torch.testing.assert_close(given, given_by(model), rtol=0, atol=0)
        torch.testing.assert_close(pieces(images), given_by(model), rtol=0, atol=0)
    assert [step.name for step in traced_model.steps(model) if isinstance(step, Merge)] == [
        "blocks.0.merge",
        "blocks.1.merge",
    ]
    assert {f"blocks.{block}.mlp.fc1" for block in range(2)} <= {layer.name for layer in layers}


def test_masks_of_any_type_keep_their_effect() -> None:
    mask_BN = torch.tensor([[1, 1, 0], [1, 0, 0]])
    expected = torch.zeros(2, 3).masked_fill(mask_BN == 0, -30_000.0)[:, None, None, :]
    for weights_BN in (mask_BN, mask_BN.float(), mask_BN.bool()):
        assert torch.equal(key_bias(weights_BN, torch.float32), expected)


def test_unpooled_model_gives_fewer_tokens_unless_unmerged() -> None:
    dense = checkpoint(global_pool="", num_classes=0).model
    with torch.inference_mode():
        given = traced_model.with_merging(dense, Merging(schedule=(3, 4)))(torch.from_numpy(images(2)))
    assert given.shape == (2, 10, 48)


@pytest.mark.slow("models")
@pytest.mark.parametrize(
    ("kwargs", "loop", "verdict"),
    [
        ({"global_pool": "avg", "class_token": False}, None, "4 of 6 sites reduced"),
        ({"global_pool": "map", "reg_tokens": 2}, Loop(reads="pooled"), "6 of 9 sites reduced"),
    ],
)
def test_closed_loops_work_with_any_pooling(kwargs: dict[str, Any], loop: Loop | None, verdict: str) -> None:
    model, images = merged_tiny(**kwargs), tiny.images(8)
    reduction = reduce_traced(model, opened(model, images), best(mlp_sparsity=0.5, attention_sparsity=0.5), loop=loop)
    assert reduction.coverage.verdict == verdict
    assert torch.isfinite(tiny.ran(reduction.model, images)).all()
