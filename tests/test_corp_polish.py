"""Polishing: planted models come closer, none ends worse, interrupted ones end with the same bits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from calib.distributed import join_ranks
from calib.images import Images
from corp_deploy.families import traced_model as vit
from corp_deploy.polish.descent import Adam, Draw, drawn, step_size
from corp_deploy.polish.matrices import chosen_
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.parts import Progress
from corp_deploy.polish.polish import polished
from corp_deploy.polish.subject import parted
from corp_deploy.polish.teacher import AugmentedTeacher, Teacher, output_error, stream_error, view
from corp_deploy.spec.merging import Merging
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.traced.models.narrowed_model import at_widths
from corp_deploy.traced.models.token_merging import Tokens
from ground.errors import BadInput
from tests import tiny
from tests.ranks import exits_of
from tests.refusals import rejects

COUNT = 24
HOWS = ("block", "model")


@pytest.fixture
def images(tmp_path: Path) -> Images:
    return tiny.opened(tmp_path / "images.npy", tiny.images(COUNT))


def narrowed(model: nn.Module) -> nn.Module:
    """The last half of every MLP's channels away, so that every block counts as reduced."""
    return at_widths(model, {f"blocks.{at}.mlp": 96 for at in (0, 1)})


def options(how: str = "model", **changes: Any) -> PolishOptions:
    """Steps that suit a few dozen of them."""
    return PolishOptions(**{"how": how, "steps": 24, "batch_size": 4, "piece": 2, "step_size": 0.06, **changes})


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


@pytest.mark.slow("models")
@pytest.mark.parametrize("how", HOWS)
def test_a_reduced_model_comes_closer_also_on_images_never_seen(how: str, images: Images) -> None:
    dense = tiny.checkpoint(init_values=0.5).model
    start, fresh = narrowed(dense), tiny.images(32, seed=9)
    before = weights(start)
    result = polished(dense, start, images, options(how, steps=60))
    report = result.report
    assert report.error < 0.8 * report.error_before
    expected = tiny.ran(dense, fresh)
    errors = [tiny.relative(tiny.ran(model, fresh), expected) for model in (result.model, start)]
    assert errors[0] < 0.9 * errors[1]
    assert all(torch.equal(value, before[name]) for name, value in start.state_dict().items())
    assert not any(parameter.requires_grad for parameter in result.model.parameters())
    assert len(report.parts) == (1 if how == "model" else 2)
    assert all(part.error <= part.error_before and part.steps == 60 for part in report.parts)
    assert report.as_json()["gradients"] is True
    json.dumps(report.as_json(), allow_nan=False)


@pytest.mark.parametrize("how", HOWS)
def test_steps_that_destroy_the_model_leave_it_as_it_was(how: str, images: Images) -> None:
    dense = tiny.checkpoint().model
    start = narrowed(dense)
    result = polished(dense, start, images, options(how, steps=6, step_size=50.0))
    assert result.report.error == result.report.error_before
    assert_same(result.model, start)
    assert polished(dense, dense, images, options("block")).report.parts == (), "no block is narrower"


@pytest.mark.parametrize("how", HOWS)
def test_the_same_seed_gives_the_same_bytes(how: str, images: Images) -> None:
    dense = tiny.checkpoint().model
    start = narrowed(dense)
    first, second, other = (
        polished(dense, start, images, options(how, steps=5, seed=seed)).model for seed in (0, 0, 1)
    )
    assert_same(first, second)
    assert any(not torch.equal(value, other.state_dict()[name]) for name, value in first.state_dict().items())


class Stopped(Exception):
    """What an interruption raises here."""


@pytest.mark.slow("training")
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("stop_at", [3, 14, 40])
def test_an_interrupted_polish_goes_on_to_the_same_bytes(
    how: str, stop_at: int, images: Images, tmp_path: Path
) -> None:
    dense, state, heard = tiny.checkpoint().model, tmp_path / "state.safetensors", list[Progress]()
    start, asked = narrowed(dense), options(how, steps=24 if how == "block" else 48)
    whole = polished(dense, start, images, asked)

    def interrupt(progress: Progress) -> None:
        heard.append(progress)
        if len(heard) == stop_at:
            raise Stopped

    with pytest.raises(Stopped):
        polished(dense, start, images, asked, state=state, on_progress=interrupt)
    again = polished(dense, start, images, asked, state=state, on_progress=heard.append)
    assert_same(again.model, whole.model)
    steps = 48
    assert stop_at < len(heard) <= steps + stop_at
    if stop_at > 12:  # a state was saved by then, so that not all is done again
        assert len(heard) < steps + stop_at
    assert [progress.share for progress in heard[stop_at:]] == sorted(progress.share for progress in heard[stop_at:])
    assert heard[-1].share == 1.0
    assert [part.error for part in again.report.parts] == [part.error for part in whole.report.parts]


def test_the_state_of_another_polish_is_refused(images: Images, tmp_path: Path) -> None:
    dense, state = tiny.checkpoint().model, tmp_path / "state.safetensors"
    start = narrowed(dense)
    polished(dense, start, images, options(steps=4), state=state)
    with pytest.raises(BadInput, match=r"state of another polish: options was .* remove the file to start afresh"):
        polished(dense, start, images, options(steps=5), state=state)
    with pytest.raises(BadInput, match="state of another polish: reduced model was"):
        polished(dense, narrowed(tiny.checkpoint(1).model), images, options(steps=4), state=state)
    for content in (b"", b"no tensors", state.read_bytes()[:-7]):
        state.write_bytes(content)
        rejects("not a polish's state", polished, dense, start, images, options(steps=4), state=state)


def test_a_time_ends_it(images: Images) -> None:
    dense = tiny.checkpoint().model
    result = polished(dense, narrowed(dense), images, options(steps=None, time_s=0.2))
    (part,) = result.report.parts
    assert part.steps >= 1
    assert part.seconds < 5.0
    assert part.curve[-1].step == part.steps


def test_inputs_held_out_are_whole_groups_and_their_copies_are_not_fitted_to(tmp_path: Path) -> None:
    pictures = tiny.images(12)
    pictures[0] = pictures[3]  # a copy of one that is held out
    images = tiny.opened(tmp_path / "images.npy", pictures)
    by_image = parted(images, 4)
    assert torch.equal(by_image.held_out.ids, images.ids[[3, 7, 11]])
    groups = torch.tensor([5, 5, 2, 2, 9, 9, 9, 1, 1, 1, 5, 2])
    by_group = parted(images, 2, groups)
    assert torch.equal(by_group.held_out.ids, images.ids[[2, 3, 7, 8, 9, 11]])
    assert torch.equal(by_group.fitted.ids, images.ids[[1, 4, 5, 6, 10]])
    assert parted(images, 8, groups).held_out.count == 3  # the last group, where there are fewer than 8
    with pytest.raises(BadInput, match="12 images in 1 different groups; expected two or more"):
        parted(images, 4, torch.zeros(12, dtype=torch.int64))


def test_many_inputs_held_out_are_thinned_evenly(tmp_path: Path) -> None:
    images = tiny.opened(tmp_path / "images.npy", tiny.images(300))
    both = parted(images, 2)
    assert both.held_out.count == 64
    assert both.fitted.count == 150
    assert set(both.held_out.ids.tolist()).isdisjoint(both.fitted.ids.tolist())


def test_lessons_kept_are_those_made_anew(images: Images) -> None:
    dense = tiny.checkpoint(init_values=0.5).model
    kept, anew = (Teacher(dense, images, cache_bytes=size) for size in (2**30, 0))
    draws = [Draw(row, 0) for row in (9, 0, 13, 8, 23, 9)]
    one, other = kept.lesson(draws), anew.lesson(draws)
    assert len(kept) == len(anew) == COUNT
    torch.testing.assert_close(one.entering_BNC, other.entering_BNC)
    for mine, theirs in zip((*one.streams, one.outputs), (*other.streams, other.outputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3)
    pictures = torch.from_numpy(tiny.images(COUNT))
    with torch.no_grad():
        torch.testing.assert_close(other.outputs, dense(pictures[[draw.row for draw in draws]]))


def test_a_view_is_a_part_of_the_image_in_its_size() -> None:
    ramp = torch.stack([torch.linspace(0, 1, 24).expand(16, 24), torch.linspace(0, 1, 16)[:, None].expand(16, 24)])
    every = [view(ramp, seed=0, number=number) for number in range(120)]
    views = [each for each in every if not torch.equal(each, ramp)]
    assert 40 < len(views) < 80  # half of the time it is the image itself
    rising = [bool(each[0, 0, -1] > each[0, 0, 0]) for each in views]
    assert 15 < sum(rising) < 45  # mirrored half of the time
    for each in views:
        assert each.shape == ramp.shape
        shares = [float(axis.max() - axis.min()) for axis in each]
        assert all(0.5 < share <= 1.0 for share in shares)  # the root of 0.35 is 0.59
        assert shares[0] == pytest.approx(shares[1], abs=0.1)
        assert float(each.min()) >= 0.0
    assert torch.equal(view(ramp, seed=0, number=7), every[7])
    assert any(not torch.equal(view(ramp, seed=1, number=number), every[number]) for number in range(9))


def test_lessons_on_views_are_the_dense_models_own(images: Images) -> None:
    dense = tiny.checkpoint().model
    kept, read = (AugmentedTeacher(dense, images, seed=3, cache_bytes=size) for size in (2**30, 0))
    draws = [Draw(5, 100), Draw(5, 104), Draw(0, 7)]
    pictures = torch.from_numpy(tiny.images(COUNT))
    with torch.no_grad():
        expected = dense(torch.stack([view(pictures[draw.row], 3, draw.number) for draw in draws]))
    for teacher in (kept, read):
        lesson = teacher.lesson(draws)
        torch.testing.assert_close(lesson.outputs, expected)
    assert not torch.equal(expected[0], expected[1])


def test_errors_are_those_of_loops_over_tokens() -> None:
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
    read = [error for (_, token), error in each.items() if token in (0, 3)]
    assert float(stream_error(Tokens(mine), dense, read=torch.tensor([0, 3]))) == pytest.approx(np.mean(read))
    expected = np.mean([float((mine[at] - dense[at]).norm() / dense[at].norm()) ** 2 for at in range(3)])
    assert float(output_error(mine, dense)) == pytest.approx(expected)


def test_a_merged_token_should_be_the_mean_of_those_it_stands_for() -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    mine = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)
    sources, sizes = torch.tensor([[0, 1, 1, 2, 1], [0, 2, 1, -1, 2]]), torch.tensor([[1.0, 3, 1], [1, 1, 2]])
    total, errors = 0.0, 0.0
    for image in range(2):
        for token in range(3):
            target = torch.stack([dense[image, at] for at in range(5) if sources[image, at] == token]).mean(dim=0)
            size = float(sizes[image, token])
            errors += size * float((mine[image, token] - target).norm() / target.norm()) ** 2
            total += size
    tokens = Tokens(mine, sizes.double(), sources)
    assert float(stream_error(tokens, dense)) == pytest.approx(errors / total)


@pytest.mark.slow("training")
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("metric", [{}, {"metric": "attended"}, {"metric": "keys"}, {"how": "drop"}])
def test_a_model_that_merges_tokens_comes_closer_too(how: str, metric: dict[str, Any], images: Images) -> None:
    dense = tiny.checkpoint(init_values=0.5).model
    start = vit.with_merging(narrowed(dense), Merging(schedule=(3, 4), **metric))
    result = polished(dense, start, images, options(how, steps=40))
    assert result.report.error < 0.9 * result.report.error_before
    assert vit.merging_of(result.model) == vit.merging_of(start)
    merging = vit.with_merging(dense, vit.merging_of(start))
    one, other = (polished(each, start, images, options(how, steps=8)) for each in (merging, dense))
    assert one.report.error < one.report.error_before
    assert_same(one.model, other.model)


def test_steps_are_those_of_torchs_adam_times_each_matrixs_scale() -> None:
    model = narrowed(tiny.checkpoint().model)
    matrices = chosen_(model)
    assert sorted({matrix.name.rpartition(".")[2] for matrix in matrices}) == ["fc1", "fc2", "proj", "qkv"]
    assert sum(parameter.requires_grad for parameter in model.parameters()) == 2 * len(matrices) == 16
    copies = [[parameter.detach().clone().requires_grad_() for parameter in matrix.parameters] for matrix in matrices]
    theirs = [
        torch.optim.Adam(each, lr=0.01 * matrix.scale, betas=(0.9, 0.99), eps=1e-12)
        for matrix, each in zip(matrices, copies, strict=True)
    ]
    zeros = [[torch.zeros_like(matrix.values_OK) for matrix in matrices] for _ in range(2)]
    adam, generator = Adam(matrices, *zeros), torch.Generator().manual_seed(0)
    for number in (1, 2, 3):
        for matrix, each in zip(matrices, copies, strict=True):
            for mine, other in zip(matrix.parameters, each, strict=True):
                # Far from nothing, where only the damping of rounding's noise differs from Adam.
                drawn_signs = torch.randint(0, 2, mine.shape, generator=generator) * 2 - 1
                mine.grad = drawn_signs * (0.5 + torch.rand(mine.shape, generator=generator))
                other.grad = mine.grad.clone()
        adam.step_(number, 0.01)
        for optimiser in theirs:
            optimiser.step()
    for matrix, each in zip(matrices, copies, strict=True):
        torch.testing.assert_close(matrix.layer.weight.detach(), each[0].detach(), rtol=0.0, atol=1e-5)
        assert matrix.layer.bias is not None
        torch.testing.assert_close(matrix.layer.bias.detach(), each[1].detach(), rtol=0.0, atol=1e-5)


def test_rows_are_drawn_each_once_a_pass() -> None:
    sequence = drawn(7, first=0, size=21, seed=3)
    assert [draw.number for draw in sequence] == list(range(21))
    passes = [[draw.row for draw in sequence[start : start + 7]] for start in (0, 7, 14)]
    assert all(sorted(rows) == list(range(7)) for rows in passes)
    assert passes[0] != passes[1]
    assert drawn(7, first=5, size=9, seed=3) == sequence[5:14]


def test_the_step_size_rises_and_falls() -> None:
    asked = options(warm_up=0.1, step_size=2.0)
    sizes = [step_size(asked, way) for way in np.linspace(0.0, 1.0, 101).tolist()]
    assert 0.0 < sizes[0] < 0.4
    assert max(sizes) == pytest.approx(2.0)
    assert sizes[:11] == sorted(sizes[:11])
    assert sizes[10:] == sorted(sizes[10:], reverse=True)
    assert sizes[-1] == 0.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"how": "all"}, "polish: got 'all', expected one of none, layer, block, model"),
        ({"how": "none", "steps": 3}, "steps and time apply to a polish"),
    ],
)
def test_options_refuse_what_contradicts_itself(fields: dict[str, Any], message: str) -> None:
    rejects(message, PolishOptions, **fields)


@pytest.mark.slow("training", "process")
def test_two_processes_are_one_with_twice_the_batch(images: Images, tmp_path: Path) -> None:
    exits = exits_of(__name__, 2, tmp_path / "images.npy", tmp_path)
    assert [code for code, _ in exits] == [0, 0], exits
    states = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    dense = tiny.checkpoint().model
    start = narrowed(dense).state_dict()
    for how in HOWS:
        alone = polished(dense, narrowed(dense), images, options(how, steps=6, batch_size=8)).model.state_dict()
        for name, value in alone.items():
            assert torch.equal(states[0][how][name], states[1][how][name])
            change = float((value - start[name]).abs().max())
            torch.testing.assert_close(states[0][how][name], value, rtol=1e-3, atol=5e-3 * change + 1e-6)
        assert any(not torch.equal(value, start[name]) for name, value in alone.items())


def one_of_several(path: str, folder: str) -> int:
    source = images_for_model(tiny.checkpoint().model, Path(path))
    dense = tiny.checkpoint().model
    with join_ranks("cpu", timeout_s=60) as ranks:
        states = {
            how: polished(dense, narrowed(dense), source, options(how, steps=6), ranks=ranks).model.state_dict()
            for how in HOWS
        }
        torch.save(states, Path(folder) / f"{ranks.rank}.pt")
    return 0
