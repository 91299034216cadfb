"""Polishing: held-out inputs, errors, saved states, and polished models that are never worse."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from calib.images import Images
from corp_deploy.families import traced_model
from corp_deploy.polish.held_out import relative_square, split_inputs, stream_error
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import polished
from corp_deploy.spec.merging import Merging
from corp_deploy.traced.models.narrowed_model import at_widths
from corp_deploy.traced.models.token_merging import Tokens
from tests import tiny
from tests.refusals import rejects

COUNT = 24


@pytest.fixture
def images(tmp_path: Path) -> Images:
    return tiny.opened(tmp_path / "images.npy", tiny.images(COUNT))


def narrowed(model: nn.Module) -> nn.Module:
    """Remove the last half of every MLP's channels, so that every MLP counts as reduced."""
    return at_widths(model, {f"blocks.{at}.mlp": 96 for at in (0, 1)})


def assert_same(one: nn.Module, other: nn.Module) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


@pytest.mark.slow("models")
def test_polish_reduces_the_error_on_unseen_images(images: Images) -> None:
    dense = tiny.checkpoint(init_values=0.5).model
    start, fresh = narrowed(dense), tiny.images(32, seed=9)
    before = copy.deepcopy(start)
    result = polished(dense, start, images, PolishOptions(steps=3))
    report = result.report
    assert report.error < 0.9 * report.error_before
    expected = tiny.ran(dense, fresh)
    errors = [tiny.relative(tiny.ran(model, fresh), expected) for model in (result.model, start)]
    assert errors[0] < 0.95 * errors[1]
    assert_same(start, before)
    assert not any(parameter.requires_grad for parameter in result.model.parameters())
    assert [part.part for part in report.parts] == ["blocks.0.mlp", "blocks.1.mlp"]
    assert all(part.error <= part.error_before for part in report.parts)
    json.dumps(report.as_json(), allow_nan=False)


def test_unreduced_model_is_not_polished(images: Images) -> None:
    dense = tiny.checkpoint().model
    result = polished(dense, dense, images, PolishOptions())
    assert result.report.parts == ()
    assert result.report.error == result.report.error_before
    assert_same(result.model, dense)


def test_state_of_another_polish_is_refused(images: Images, tmp_path: Path) -> None:
    dense, state = tiny.checkpoint().model, tmp_path / "state.safetensors"
    start = narrowed(dense)
    polished(dense, start, images, PolishOptions(steps=1), state=state)
    message = r"state of another polish: options was .* remove the file to start afresh"
    rejects(message, polished, dense, start, images, PolishOptions(steps=2), state=state)
    other, message = narrowed(tiny.checkpoint(1).model), "state of another polish: reduced model was"
    rejects(message, polished, dense, other, images, PolishOptions(steps=1), state=state)
    for content in (b"", b"no tensors", state.read_bytes()[:-7]):
        state.write_bytes(content)
        rejects("not a polish's state", polished, dense, start, images, PolishOptions(steps=1), state=state)


def test_time_limit_ends_the_polish(images: Images) -> None:
    dense = tiny.checkpoint().model
    parts = polished(dense, narrowed(dense), images, PolishOptions(time_s=0.01)).report.parts
    assert sum(part.steps for part in parts) in (1, 2)
    assert sum(part.seconds for part in parts) < 5.0


def test_held_out_inputs_are_whole_groups_without_copies_in_the_fit(tmp_path: Path) -> None:
    pictures = tiny.images(12)
    pictures[0] = pictures[3]  # a copy of a held-out image
    images = tiny.opened(tmp_path / "images.npy", pictures)
    by_image = split_inputs(images, 4)
    assert torch.equal(by_image.held_out.ids, images.ids[[3, 7, 11]])
    groups = torch.tensor([5, 5, 2, 2, 9, 9, 9, 1, 1, 1, 5, 2])
    by_group = split_inputs(images, 2, groups)
    assert torch.equal(by_group.held_out.ids, images.ids[[2, 3, 7, 8, 9, 11]])
    assert torch.equal(by_group.fitted.ids, images.ids[[1, 4, 5, 6, 10]])
    assert split_inputs(images, 8, groups).held_out.count == 3, "of fewer than 8 groups, the last is held out"
    one_group = torch.zeros(12, dtype=torch.int64)
    rejects("12 images in 1 different groups; expected two or more", split_inputs, images, 4, one_group)


def test_many_held_out_inputs_are_thinned_evenly(tmp_path: Path) -> None:
    images = tiny.opened(tmp_path / "images.npy", tiny.images(300))
    both = split_inputs(images, 2)
    assert both.held_out.count == 64
    assert both.fitted.count == 150
    assert set(both.held_out.ids.tolist()).isdisjoint(both.fitted.ids.tolist())


def test_errors_equal_explicit_loops_over_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    mine, dense = (torch.randn(3, 5, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    there = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [2, 1, 1, 3, 0]], dtype=torch.float64)
    each = {
        (image, token): float((mine[image, token] - dense[image, token]).norm() / dense[image, token].norm()) ** 2
        for image in range(3)
        for token in range(5)
    }
    assert float(stream_error(Tokens(mine), dense)) == pytest.approx(np.mean(list(each.values())))
    weighted = sum(error * float(there[place]) for place, error in each.items()) / float(there.sum())
    assert float(stream_error(Tokens(mine, there), dense)) == pytest.approx(weighted)
    expected = np.mean([float((mine[at] - dense[at]).norm() / dense[at].norm()) ** 2 for at in range(3)])
    assert float(relative_square(mine, dense)) == pytest.approx(expected)


def test_merged_token_targets_the_mean_of_its_sources() -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    mine = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)
    sources, sizes = torch.tensor([[0, 1, 1, 2, 1], [0, 2, 1, -1, 2]]), torch.tensor([[1.0, 3, 1], [1, 1, 2]])
    errors = 0.0
    for image in range(2):
        for token in range(3):
            target = dense[image, sources[image] == token].mean(dim=0)
            errors += float(sizes[image, token] * ((mine[image, token] - target).norm() / target.norm()) ** 2)
    tokens = Tokens(mine, sizes.double(), sources)
    assert float(stream_error(tokens, dense)) == pytest.approx(errors / float(sizes.sum()))


@pytest.mark.slow("training")
@pytest.mark.parametrize("metric", [{}, {"metric": "attended"}, {"metric": "keys"}, {"how": "drop"}])
def test_polish_reduces_the_error_of_merged_models(metric: dict[str, Any], images: Images) -> None:
    dense = tiny.checkpoint(init_values=0.5).model
    start = traced_model.with_merging(narrowed(dense), Merging(schedule=(3, 4), **metric))
    result = polished(dense, start, images, PolishOptions(steps=1))
    assert result.report.error < 0.95 * result.report.error_before
    assert traced_model.merging_of(result.model) == traced_model.merging_of(start)
    merging = polished(
        traced_model.with_merging(dense, traced_model.merging_of(start)), start, images, PolishOptions(steps=1)
    )
    assert_same(merging.model, result.model)


@pytest.mark.parametrize("fields", [{"steps": 0}, {"time_s": 0.0}])
def test_zero_length_polish_is_refused(fields: dict[str, Any]) -> None:
    rejects("expected positive numbers", PolishOptions, **fields)
