"""Moments and closed loops of models that merge tokens: sums weighted by size, targets that are means of tokens."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from calib.collect import collect
from calib.moments import ChannelMoments, HeadMoments, Moments
from corp_deploy.algebra.regression_sums import DifferenceSums, RegressionSums
from corp_deploy.families import timm_vit as vit
from corp_deploy.families.merging import Merging
from corp_deploy.families.sites import calibration_taps
from corp_deploy.families.steps import Branch, Walk
from corp_deploy.proof.shift import shift_of_inputs
from corp_deploy.reduction.closed_loop import Loop, reduce_closed_loop
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.moments import merging_note
from corp_deploy.reduction.streams import Streams
from corp_deploy.reduction.symmetric_loop import reduce_symmetric_loop
from corp_deploy.store.checkpoint import load_checkpoint
from corp_deploy.store.inputs import lineage_of_model
from examples.digits.images import load
from ground.errors import BadInput
from tests import tiny
from tests.test_corp_closed_loop import EXAMPLE, best, logits, opened, relative_error

SCHEDULE = (3, 4)


def merged_tiny(options: Any = (), **kwargs: Any) -> nn.Module:
    return vit.with_merging(tiny.checkpoint(**kwargs).model, Merging(schedule=SCHEDULE, **dict(options)))


def moments_of(model: nn.Module, images: np.ndarray) -> Moments:
    taps = calibration_taps(model, vit.sites(model))
    return collect(model, taps, [torch.from_numpy(images)], device="cpu", lineage=lineage_of_model(model))


@cache
def sums_by_loops() -> dict[str, Tensor]:
    """By site: sums of outer products of what enters the last layer, beside a 1, image by image and token by token."""
    model, sums = merged_tiny(), dict[str, Tensor]()
    for image in torch.from_numpy(tiny.images(9)).split(1):
        walk = Walk.of(vit.embedded(model, image), None)
        for step in vit.steps(model):
            if isinstance(step, Branch):
                entered = list[Tensor]()
                last = step.layer.get_submodule("proj" if step.name.endswith("attn") else "fc2")
                handle = last.register_forward_pre_hook(lambda _, inputs, entered=entered: entered.append(inputs[0]))
                walk.behind(step)
                handle.remove()
                x_NF = entered[0][0].detach().double()
                sizes_N = [1.0] * len(x_NF) if walk.tokens.sizes is None else walk.tokens.sizes[0].tolist()
                rows = [torch.cat([x_F, torch.ones(1)]) for x_F in x_NF]
                outer = [size * torch.outer(x_F, x_F) for size, x_F in zip(sizes_N, rows, strict=True)]
                sums[step.name] = sums.get(step.name, 0.0) + torch.stack(outer).sum(dim=0)
            walk = walk.behind(step)
    return sums


def test_moments_count_each_token_by_its_size() -> None:
    with torch.no_grad():
        expected = sums_by_loops()
    moments = moments_of(merged_tiny(), tiny.images(9))
    for name, sums in moments.sites.items():
        assert isinstance(sums, ChannelMoments | HeadMoments)
        gram = sums.gram_FF if isinstance(sums, ChannelMoments) else sums.zz_CC
        mean = sums.sum_F if isinstance(sums, ChannelMoments) else sums.z_sum_C
        assert sums.tokens == pytest.approx(float(expected[name][-1, -1])) == 9 * 17
        assert relative_error(gram, expected[name][:-1, :-1]) < 1e-6
        assert relative_error(mean, expected[name][:-1, -1]) < 1e-6
    first, second = moments.sites["blocks.0.attn"], moments.sites["blocks.1.attn"]
    assert isinstance(first, HeadMoments)
    assert isinstance(second, HeadMoments)
    dense = moments_of(tiny.checkpoint().model, tiny.images(9)).sites["blocks.0.attn"]
    assert isinstance(dense, HeadMoments)
    assert torch.equal(first.qq_HDD, dense.qq_HDD)


def test_moments_of_dropped_tokens_count_those_that_are_left() -> None:
    moments = moments_of(merged_tiny({"how": "drop"}), tiny.images(9))
    tokens = {name: sums.tokens for name, sums in moments.sites.items()}
    assert tokens == {"blocks.0.attn": 153, "blocks.0.mlp": 126, "blocks.1.attn": 126, "blocks.1.mlp": 90}


def test_moments_tell_which_tokens_were_merged() -> None:
    dense, merged = tiny.checkpoint().model, merged_tiny()
    with_merging = moments_of(merged, tiny.images(4))
    assert not merging_note(merged, with_merging)
    assert "while tokens were merged as" in merging_note(dense, with_merging)
    assert "without merged tokens" in merging_note(merged, moments_of(dense, tiny.images(4)))


def test_weighted_sums_are_those_of_repeated_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    x_BNK, t_BNO = (torch.randn(2, 5, width, generator=generator) for width in (4, 3))
    weights_BN = torch.tensor([[1.0, 2.0, 1.0, 3.0, 1.0]] * 2)
    repeats = weights_BN[0].long()
    for sums, targets_BNO in ((RegressionSums, t_BNO), (DifferenceSums, x_BNK.flip(1))):
        width = targets_BNO.shape[-1]
        make = {"inputs": 4, "outputs": width} if sums is RegressionSums else {"width": 4}
        weighted, repeated = sums.empty(**make), sums.empty(**make)  # type: ignore[arg-type]
        weighted.add(x_BNK, targets_BNO, weights_BN)
        repeated.add(x_BNK.repeat_interleave(repeats, dim=1), targets_BNO.repeat_interleave(repeats, dim=1))
        pairs = [(weighted, repeated)] if sums is RegressionSums else [(weighted.on_x, repeated.on_x)]  # type: ignore[union-attr]
        for one, other in pairs:
            assert isinstance(one, RegressionSums)
            assert isinstance(other, RegressionSums)
            assert one.x.tokens == other.x.tokens == 16
            for got, expected in ((one.x.gram_KK, other.x.gram_KK), (one.tx_OK, other.tx_OK), (one.t_O, other.t_O)):
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(one.tt, other.tt, rtol=1e-5, atol=1e-5)


def last_stream(model: nn.Module, images: np.ndarray) -> Tensor:
    seen: list[Tensor] = []
    handle = tiny.last_block(model).register_forward_hook(lambda _, __, out: seen.append(out))
    logits(model, images)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("options", [{}, {"metric": "keys"}, {"how": "drop"}])
def test_the_streams_are_the_models_own_and_the_dense_one_is_dense(
    options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, images = tiny.checkpoint().model, tiny.images(12)
    model = vit.with_merging(dense, Merging(schedule=SCHEDULE, **options))
    kept: list[Streams] = []
    monkeypatch.setattr(
        "corp_deploy.reduction.streams.Streams",
        lambda *args, **kwargs: kept.append(Streams(*args, **kwargs)) or kept[-1],  # type: ignore[func-returns-value]
    )
    reduction = reduce_closed_loop(model, opened(model, images), best(mlp_sparsity=0.5, attention_sparsity=0.5))
    assert vit.merging_of(reduction.model) == vit.merging_of(model)
    order = [0, 1, 2, 4, 5, 6, 8, 9, 10, 3, 7, 11]  # those held out stand apart
    got = [torch.cat([getattr(pair, which) for pair in kept[0]]) for which in ("reduced", "dense")]
    torch.testing.assert_close(got[0], last_stream(reduction.model, images)[order])
    torch.testing.assert_close(got[1], last_stream(dense, images)[order])
    for pair in kept[0]:
        assert pair.sources_BM is not None
        for image, token in ((0, 0), (1, 5), (2, 9)):
            members = pair.sources_BM[image] == token
            torch.testing.assert_close(pair.target[image, token], pair.dense[image, members].mean(dim=0))
            size = 1.0 if pair.sizes_BN is None else float(pair.sizes_BN[image, token])
            assert size == int(members.sum()) or options.get("how") == "drop"


@pytest.mark.parametrize(
    "kwargs", [{}, {"global_pool": "avg", "class_token": False}, {"global_pool": "map", "reg_tokens": 2}]
)
def test_closed_loops_go_through_any_pooling(kwargs: dict[str, Any]) -> None:
    model, images = merged_tiny(**kwargs), tiny.images(16)
    method = best(mlp_sparsity=0.5, attention_sparsity=0.5)
    for reduction in (
        reduce_closed_loop(model, opened(model, images), method, loop=Loop(reads="pooled")),
        reduce_symmetric_loop(model, opened(model, images), method),
    ):
        assert reduction.coverage.verdict == "4 of 4 sites reduced"
        assert torch.isfinite(logits(reduction.model, images)).all()


@pytest.mark.slow("models")
def test_on_a_trained_model_the_closed_loop_repairs_what_merging_changed() -> None:
    dense = load_checkpoint(EXAMPLE).model
    pixels, held_out = load("train").images[:256], load("held-out").images[:128]
    model = vit.with_merging(dense, Merging(schedule=(8, 8, 8, 8, 8, 4), metric="stream"))
    expected = logits(dense, held_out)
    merged_alone = relative_error(logits(model, held_out), expected)
    full = best(mlp_sparsity=0.0, attention_sparsity=0.0)
    repaired = reduce_closed_loop(model, opened(model, pixels), full).model
    assert relative_error(logits(repaired, held_out), expected) < 0.97 * merged_alone
    half = best(mlp_sparsity=0.5, attention_sparsity=0.5)
    opened_loop = reduce(model, moments_of(model, pixels), half).model
    closed = reduce_closed_loop(model, opened(model, pixels), half).model
    errors = [relative_error(logits(each, held_out), expected) for each in (closed, opened_loop)]
    assert errors[0] < 0.97 * errors[1], errors


def test_images_are_compared_with_moments_as_tokens_were_merged_then() -> None:
    dense, pixels = tiny.checkpoint(), tiny.images(64)
    moments = moments_of(merged_tiny(), pixels)
    merged = shift_of_inputs(dense, moments, {"images": pixels})
    plain = {key: text for key, text in moments.lineage.items() if key != "merging"}
    otherwise = shift_of_inputs(dense, replace(moments, lineage=plain), {"images": pixels})
    assert merged is not None
    assert otherwise is not None
    assert max(site.mean_distance for site in merged.sites) < max(site.mean_distance for site in otherwise.sites)
    for text in ("{", "[]", '{"schedule": [], "metric": "stream", "how": "merge", "unmerged": false}'):
        with pytest.raises(BadInput, match="the moments' merging"):
            shift_of_inputs(dense, replace(moments, lineage={**plain, "merging": text}), {"images": pixels})
