"""Token merging: the arithmetic against loops over tokens in float64, and merged models against their dense ones."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corp_deploy import load
from corp_deploy.families import traced_model
from corp_deploy.store.checkpoint import Checkpoint, save
from corp_deploy.traced.models.merging import Merging, Metric, schedule_from_text
from corp_deploy.traced.models.token_merging import (
    Tokens,
    alike,
    dropped,
    key_bias,
    matched,
    merged,
    sources_of,
    unmerged,
    ward,
)
from ground.errors import BadInput
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
def test_a_merge_is_what_loops_over_tokens_give(tokens: int, protected: int, count: int, metric: Metric) -> None:
    x_BNC, sizes_BN, compared_BNX = stream(tokens), sizes_of(tokens), stream(tokens, seed=2, channels=4)
    given = Tokens(x_BNC, sizes_BN, sources_of(x_BNC))
    got = merged(given, matched(alike(metric, x_BNC, compared_BNX, sizes_BN, protected), count), protected)
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


def test_what_all_tokens_have_in_common_changes_no_choice() -> None:
    x_BNC, sizes_BN = stream(21).float(), sizes_of(21)
    plain_BAD = ward(x_BNC, sizes_BN, 1)
    far_BAD = ward(x_BNC + 1000.0, sizes_BN, 1)
    torch.testing.assert_close(far_BAD, plain_BAD, rtol=2e-3, atol=2e-3)  # 1000 in float32 has four digits left
    assert torch.equal(matched(far_BAD, 5).merged, matched(plain_BAD, 5).merged)
    torch.testing.assert_close(ward(x_BNC, None, 1), ward(x_BNC, torch.ones(3, 21), 1))


@pytest.mark.parametrize("metric", ["ward", "stream"])
def test_planted_duplicates_are_merged_first_and_change_nothing(metric: Metric) -> None:
    x_BNC = stream(13)
    for even, odd in ((1, 4), (5, 2), (11, 12)):  # behind one protected token, odd numbers are the even places
        x_BNC[:, even] = x_BNC[:, odd]
    match = matched(alike(metric, x_BNC, x_BNC, sizes_of(13), 1), 3)
    assert [sorted(1 + 2 * place for place in row) for row in match.merged.tolist()] == [[1, 5, 11]] * 3
    got = merged(Tokens(x_BNC, sizes_of(13), sources_of(x_BNC)), match, 1)
    assert got.sources is not None
    torch.testing.assert_close(unmerged(got.x, got.sources), x_BNC, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("metric", ["ward", "stream"])
def test_of_equals_the_first_is_merged_into_the_first(metric: Metric) -> None:
    match = matched(alike(metric, torch.ones(2, 10, 3), torch.ones(2, 10, 3), None, 0), 2)
    assert match.merged.tolist() == [[0, 1]] * 2
    assert match.into.tolist() == [[0] * 5] * 2
    assert match.kept.tolist() == [[2, 3, 4]] * 2


def test_dropped_tokens_are_those_of_least_attention() -> None:
    x_BNC = stream(7, batch=1)
    attention_BN = torch.tensor([[0.0, 0.3, 0.1, 0.1, 0.2, 0.1, 0.2]])
    got = dropped(Tokens(x_BNC, None, sources_of(x_BNC)), attention_BN, 2, 1)
    assert torch.equal(got.x, x_BNC[:, [0, 1, 4, 5, 6]])
    assert got.sizes is None
    assert got.sources is not None
    assert got.sources.tolist() == [[0, 1, -1, -1, 2, 3, 4]]
    again = dropped(got, torch.tensor([[0.0, 0.1, 0.5, 0.4, 0.3]]), 1, 1)
    assert again.sources is not None
    assert again.sources.tolist() == [[0, -1, -1, -1, 1, 2, 3]]


def test_masks_of_any_type_add_what_they_did() -> None:
    mask_BN = torch.tensor([[1, 1, 0], [1, 0, 0]])
    expected = torch.zeros(2, 3).masked_fill(mask_BN == 0, -30_000.0)[:, None, None, :]
    for weights_BN in (mask_BN, mask_BN.float(), mask_BN.bool()):
        assert torch.equal(key_bias(weights_BN, torch.float32), expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"metric": "attended"}, {"metric": "stream"}, {"metric": "keys"}, {"how": "drop"}, {"unmerged": True}],
)
def test_a_schedule_of_nothing_is_the_dense_model(options: Any) -> None:
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
        ({"global_pool": "avg", "class_token": False}, {}),
        ({"global_pool": "max", "reg_tokens": 2}, {}),
        ({"global_pool": "map", "class_token": False}, {}),
        ({"global_pool": "", "num_classes": 0}, {"unmerged": True}),
        ({"init_values": 0.5, "qk_norm": False}, {}),
    ],
)
def test_a_merged_model_is_what_loops_over_tokens_give(kwargs: dict[str, Any], options: Any) -> None:
    dense = checkpoint(depth=3, **kwargs).model
    merging = Merging(schedule=(3, 0, 4), **options)
    x = torch.from_numpy(images(3))
    with torch.inference_mode():
        got = traced_model.with_merging(dense, merging)(x)
        expected = by_loops(copy.deepcopy(dense).double(), x.double(), merging).float()
        assert got.shape == dense(x).shape
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_tokens_of_a_model_without_pooling_are_fewer_unless_unmerged() -> None:
    dense = checkpoint(global_pool="", num_classes=0).model
    with torch.inference_mode():
        given = traced_model.with_merging(dense, Merging(schedule=(3, 4)))(torch.from_numpy(images(2)))
    assert given.shape == (2, 10, 48)


def test_dropping_needs_a_class_token_and_gives_nothing_back() -> None:
    model = checkpoint(class_token=False, global_pool="avg").model
    for options in ({"how": "drop"}, {"metric": "attended"}):
        with pytest.raises(BadInput, match="the model has none"):
            traced_model.with_merging(model, Merging(schedule=(1, 1), **options))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="no value to restore"):
        Merging(schedule=(1, 1), how="drop", unmerged=True)


def test_a_merged_model_is_saved_and_loaded_and_becomes_dense_again(tmp_path: Path) -> None:
    dense = checkpoint()
    merging = Merging(schedule=(3, 4), metric="keys")
    model = traced_model.with_merging(dense.model, merging)
    save(Checkpoint(model=model, architecture=dense.architecture, lineage={}), tmp_path)
    loaded, x = load(tmp_path), torch.from_numpy(images(3))
    assert traced_model.merging_of(loaded) == merging
    with torch.inference_mode():
        assert torch.equal(loaded(x), model(x))
        plain = traced_model.with_merging(loaded, None)
        assert traced_model.merging_of(plain) is None
        assert torch.equal(plain(x), dense.model(x))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"schedule": [3]}, "a schedule of 1 entries for 2 blocks"),
        ({"schedule": [3, 9]}, "block 1 has 14 tokens, 1 of them protected, so it can merge 6 at most, got 9"),
        ({"schedule": [3, -1]}, "merging.schedule"),
        ({"schedule": []}, "merging.schedule"),
        ({"metric": "values"}, "merging.metric"),
        ({"how": "drop", "unmerged": True}, "no value to restore"),
        ({"sizes": 3}, "merging"),
    ],
)
def test_an_entry_that_is_none_is_refused_by_name(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    dense = checkpoint()
    model = traced_model.with_merging(dense.model, Merging(schedule=(3, 4)))
    save(Checkpoint(model=model, architecture=dense.architecture, lineage={}), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["merging"] |= entry
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=message) as refusal:
        load(tmp_path)
    assert "config.json" in str(refusal.value)


def test_schedules_as_people_write_them() -> None:
    assert schedule_from_text("12", 3) == (12, 12, 12)
    assert schedule_from_text("0,4,8", 3) == (0, 4, 8)
    assert schedule_from_text("grow:36", 12) == (0, 3, 7, 10, 13, 16, 20, 23, 26, 29, 33, 36)
    assert schedule_from_text("grow:5", 1) == (0,)
    for text in ("", "x", "1,2", "-1", "grow:", "1.5", "٣"):
        with pytest.raises(BadInput, match="expected how many tokens"):
            schedule_from_text(text, 3)
