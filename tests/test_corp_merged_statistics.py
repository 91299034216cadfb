"""Moments and closed loops of models that merge tokens: sums weighted by size, targets that are means of tokens."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from calib.moments import ChannelMoments, HeadMoments, Moments
from corp_deploy.algebra.regression import RegressionSums
from corp_deploy.families.traced_model import with_merging
from corp_deploy.proof.structural_tests import shift_of_inputs
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.moments import merging_note
from corp_deploy.reduction.traced_loop import reduce_traced
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.traced.models.merging import Merging
from ground.errors import BadInput
from tests import tiny
from tests.test_corp_closed_loop import best, opened
from tests.test_corp_token_merging import by_loops

SCHEDULE = (3, 4)


def merged_tiny(options: Any = (), **kwargs: Any) -> nn.Module:
    return with_merging(tiny.checkpoint(**kwargs).model, Merging(schedule=SCHEDULE, **dict(options)))


def moments_of(model: nn.Module, images: np.ndarray) -> Moments:
    checkpoint = Checkpoint(model=model, architecture=tiny.ARCHITECTURE, lineage={})
    return calibrate(checkpoint, opened(model, images), batch_size=8)


def test_moments_count_each_token_by_its_size() -> None:
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


def test_moments_of_dropped_tokens_count_those_that_are_left() -> None:
    moments = moments_of(merged_tiny({"how": "drop"}), tiny.images(9))
    tokens = {name: sums.tokens for name, sums in moments.sites.items()}
    assert tokens == {
        "blocks.0.attn.qk": 153,
        "blocks.0.attn.proj": 153,
        "blocks.0.mlp.fc2": 126,
        "blocks.1.attn.qk": 126,
        "blocks.1.attn.proj": 126,
        "blocks.1.mlp.fc2": 90,
    }


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
    one, other = (RegressionSums.empty(inputs=4, outputs=3) for _ in range(2))
    one.add(x_BNK, t_BNO, weights_BN)
    other.add(x_BNK.repeat_interleave(repeats, dim=1), t_BNO.repeat_interleave(repeats, dim=1))
    assert one.x.tokens == other.x.tokens == 16
    for got, expected in ((one.x.gram_KK, other.x.gram_KK), (one.tx_OK, other.tx_OK), (one.t_O, other.t_O)):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.tt, other.tt, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kwargs", "verdict"),
    [
        ({}, "4 of 6 sites reduced"),
        ({"global_pool": "avg", "class_token": False}, "4 of 6 sites reduced"),
        ({"global_pool": "map", "reg_tokens": 2}, "6 of 9 sites reduced"),
    ],
)
def test_closed_loops_go_through_any_pooling(kwargs: dict[str, Any], verdict: str) -> None:
    model, images = merged_tiny(**kwargs), tiny.images(16)
    method = best(mlp_sparsity=0.5, attention_sparsity=0.5)
    for reduction in (
        reduce_traced(model, opened(model, images), method, loop=Loop(reads="pooled")),
        reduce_traced(model, opened(model, images), method),
    ):
        assert reduction.coverage.verdict == verdict
        assert torch.isfinite(tiny.ran(reduction.model, images)).all()


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
