"""What was tried on the real encoder, on an encoder and crops that take seconds."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.real import efforts, subject, tried, tried_merging, tried_polish
from benchmarks.real.page import efforts as pages_efforts
from benchmarks.real.page import tried as tables
from corp_deploy.families import traced_model
from corp_deploy.polish.matrices import Matrix
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.spec.merging import Merging
from corp_deploy.store.checkpoint import Checkpoint, save
from corp_deploy.store.inputs import images_for_model
from ground.errors import Missing
from tests import tiny

pytestmark = pytest.mark.nightly

KWARGS: dict[str, Any] = {"img_size": 32, "patch_size": 8, "num_classes": 0, "init_values": 0.5}


def encoder_and_crops(at: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    checkpoint = tiny.checkpoint(**KWARGS)
    monkeypatch.setattr(subject, "ARCHITECTURE", checkpoint.architecture)
    save_file(checkpoint.model.state_dict(), at / "dinov2_s.safetensors")
    (at / "head.safetensors").touch()
    for name, count in (("calib", 30), ("held", 6)):
        np.save(at / f"{name}.npy", tiny.images(count, seed=count))
        (at / f"{name}_groups.json").write_text(json.dumps([f"{place % 5}.jpg" for place in range(count)]))
    return checkpoint


def tried_by(command: click.Command, at: Path, *more: str) -> dict[str, Any]:
    """The record of what a benchmark tried on that encoder."""
    given = ["--output", str(at / "tried.json"), "--ready", str(at), "--work", str(at / "work")]
    few = ["--crops", "30", "--held-out", "6", "--threads", str(torch.get_num_threads())]
    done = CliRunner().invoke(command, [*given, *few, *more])
    assert done.exit_code == 0, done.output
    record: dict[str, Any] = json.loads((at / "tried.json").read_text())
    return record


def test_every_way_has_its_row_and_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder_and_crops(tmp_path, monkeypatch)
    few = {"WIDTH": 96, "WIDTHS": (96,), "RANKS": (0, 8), "STREAMS": (44, 30), "BLOCKS_SHOWN": (1,)}
    for name, value in few.items():
        monkeypatch.setattr(tried, name, value)
    record = tried_by(tried.main, tmp_path)
    assert len({row["way"] for row in record["halves"]}) == len(record["halves"]) == 11
    plain, *others = (row["fitted_class_error"] for row in record["halves"])
    assert 0.0 < plain < 1.0
    assert all(error != plain for error in others)
    assert [row["rank"] for row in record["beside"]] == [0, 8]
    wide, narrow = record["streams"]
    assert 0.0 < wide["held_out_class_error"] < narrow["held_out_class_error"]
    text = tables(record)
    assert all(row["way"] in text for row in record["halves"])
    assert text.count(" / ") == 1 + 2 * 11 + 2 + 2 * 2


def test_tokens_merged_in_other_ways_have_their_rows_and_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = encoder_and_crops(tmp_path, monkeypatch)
    monkeypatch.setattr(tried_merging, "SCHEDULES", {0.8: (0,) * 2, 0.7: (3, 4)})
    record = tried_by(tried_merging.main, tmp_path)
    nothing, some = ({row["way"]: row for row in record["merging"] if row["share"] == share} for share in (0.8, 0.7))
    assert max(row["patch_error"] for row in nothing.values()) < 1e-5
    plain = some.pop("as built")
    assert all(row["patch_error"] != plain["patch_error"] for row in some.values())
    images = torch.from_numpy(np.load(tmp_path / "held.npy"))
    with torch.inference_mode():
        built = traced_model.with_merging(checkpoint.model, Merging(schedule=(3, 4), unmerged=True))
        errors = relative_errors(built(images), checkpoint.model(images))
    assert plain["class_error"] == pytest.approx(float(errors.square().mean().sqrt()), rel=1e-4)
    text = tables(record | {"halves": [], "beside": [], "streams": []})
    assert all(f"0.7: {way} |" in text for way in some)


def test_polishes_tried_have_their_rows_and_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, reduced = encoder_and_crops(tmp_path, monkeypatch), tmp_path / "reduced"
    images = images_for_model(checkpoint.model, tmp_path / "calib.npy")
    moments = calibrate(checkpoint, images, batch_size=8)
    small = reduce(checkpoint.model, moments, method_from_preset("best", mlp_sparsity=0.5, align_hidden=8))
    save(replace(checkpoint, model=small.model, lineage={}), reduced)
    record = tried_by(tried_polish.main, tmp_path, "--reduced", str(reduced), "--steps", "1")
    assert [row["way"] for row in record["polishes"]] == ["none", *tried_polish.WAYS]
    assert all(row["judged"] <= row["judged_before"] for row in record["polishes"][1:])
    text = tables(record | {"halves": [], "beside": [], "streams": []})
    assert all(f"| {way} | 1 |" in text for way in tried_polish.WAYS)


def test_an_update_of_low_rank_steps_along_its_own_gradients() -> None:
    layer = torch.nn.Linear(9, 7).double()
    dense, x, target = layer.weight.detach().clone(), torch.randn(20, 9).double(), torch.randn(20, 7).double()
    matrix = Matrix(name="layer", layer=layer, scale=1.0)
    left, right = tried_polish.LowRank.both(matrix, 3)
    bias = left.dense_OK[:, -1]
    left.set_(torch.randn(7, 3).double())

    def loss(a: Tensor, b: Tensor) -> Tensor:
        change = a.double() @ b.double()
        return ((x @ (dense + change[:, :-1]).T + bias + change[:, -1] - target) ** 2).sum()

    a, b = left.own.clone().requires_grad_(), right.own.clone().requires_grad_()
    expected = torch.autograd.grad(loss(a, b), (a, b))
    ((layer(x) - target) ** 2).sum().backward()
    for side, gradient in zip((left, right), expected, strict=True):
        torch.testing.assert_close(side.gradient_OK.double(), gradient.double(), rtol=1e-4, atol=1e-4)


def test_what_tells_the_energy_of_tokens_is_a_ridge_regression() -> None:
    generator = torch.Generator().manual_seed(0)
    stream, energies = torch.randn(50, 6, generator=generator), torch.rand(50, generator=generator)
    x = torch.nn.functional.layer_norm(stream.double(), (6,))
    rows = torch.cat([x, torch.ones(50, 1).double()], dim=1)
    ridge = (tried_merging.RIDGE * rows.square().sum(0).mean()).sqrt()
    logarithm = (energies / energies.mean()).clamp_min(tried_merging.LEAST).log().double()
    padded = torch.cat([rows, ridge * torch.eye(7).double()]), torch.cat([logarithm, torch.zeros(7).double()])
    expected = torch.linalg.lstsq(padded[0], padded[1][:, None]).solution[:, 0]
    torch.testing.assert_close(tried_merging.energy_weights(stream, energies).double(), expected, rtol=1e-4, atol=1e-5)


def relative_errors(found: Tensor, dense: Tensor) -> Tensor:
    """Of each image's outputs."""
    errors: Tensor = (found - dense).flatten(1).norm(dim=1) / dense.flatten(1).norm(dim=1)
    return errors


def lost_by_least_squares(rows: Tensor, target: Tensor) -> float:
    """Of the variance of a target what columns and a constant don't explain, in float64."""
    solved = torch.linalg.lstsq(torch.cat([rows, torch.ones(len(rows), 1).double()], dim=1), target).solution
    left = target - torch.cat([rows, torch.ones(len(rows), 1).double()], dim=1) @ solved
    return float(left.square().sum() / (target - target.mean(dim=0)).square().sum())


def test_a_map_beside_the_channels_is_the_joint_least_squares(tmp_path: Path) -> None:
    """As many ranks as inputs leave nothing out, no rank is the repair of channels alone."""
    model = tiny.checkpoint(**KWARGS).model
    images = torch.from_numpy(tiny.images(8))
    seen = dict[str, Tensor]()
    block = model.get_submodule("blocks.1")
    block.get_submodule("mlp.fc1").register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
    block.get_submodule("mlp.fc2").register_forward_pre_hook(lambda _, args: seen.update(h=args[0]))
    sums = tried.sums_of(model, images, with_gradients=False)[1].moments["even"]
    h, x = (seen[name].detach().flatten(0, 1).double() for name in ("h", "x"))
    weight = (block.get_parameter("mlp.fc2.weight") * block.get_parameter("ls2.gamma")[:, None]).detach().double()
    target = h @ weight.T
    for rank in (0, 48):
        lost, elsewhere = tried.beside(block, sums, sums, 80, rank)
        assert elsewhere == pytest.approx(lost, rel=1e-6)
        best = min(
            lost_by_least_squares(torch.cat([h[:, kept], x], dim=1) if rank else h[:, kept], target)
            for kept in tried.orders_of(block, sums, 80 - rank)
        )
        assert lost == pytest.approx(best, rel=0.05, abs=1e-4)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Carries out the benchmark of efforts on a small model, and gives its record."""

    def small(scratch: Path, crops: int, held_out: int) -> efforts.Subject:
        dense, sets = tiny.checkpoint(), []
        for name, count in (("calib", crops), ("held", held_out)):
            np.save(scratch / f"{name}.npy", tiny.images(count, seed=count))
            sets.append(images_for_model(dense.model, scratch / f"{name}.npy"))
        asked = {"half": {"mlp": 0.5, "attn": 0.5, "align": {"mlp": 8, "head": 8, "conv": 32}}}
        return efforts.Subject(dense=dense, inputs=sets[0], judging=sets[1], asked=asked)

    def absent(*_: Any) -> efforts.Subject:
        raise Missing("not installed")

    def run(*words: str) -> dict[str, Any]:
        few = ["--crops", "24", "--held-out", "6", "--polish-steps", "1", "--threads", str(torch.get_num_threads())]
        named = ["--output", str(tmp_path / "e.json"), "--models", "absent,small"]
        done = CliRunner().invoke(efforts.main, [*named, *few, *words])
        assert done.exit_code == 0, done.output
        assert "absent: skipped: not installed" in done.output
        record: dict[str, Any] = json.loads((tmp_path / "e.json").read_text())
        return record

    monkeypatch.setattr(efforts, "SUBJECTS", {"small": small, "absent": absent})
    return run


def lines_of(record: dict[str, Any], at: int) -> list[str]:
    """What stands in one column of the page, of all rows of the model."""
    return [line.split(" | ")[at] for line in pages_efforts(record).splitlines() if line.startswith("| small")]


def test_efforts_of_a_model_have_their_rows_and_lines(measured: Callable[..., dict[str, Any]]) -> None:
    record = measured("--efforts", "quick,standard,thorough")
    quick, standard, thorough = record["rows"]
    assert [row["effort"] for row in record["rows"]] == ["quick", "standard", "thorough"]
    assert quick["stages"] == []
    assert [stage["name"] for stage in standard["stages"]] == ["one pass over the moments", "the closed loop"]
    assert thorough["polish"]["error"] <= thorough["polish"]["error_before"]
    assert quick["polish"] is standard["polish"] is None
    assert all(0.0 < row["error"] < 1.0 and row["passes"] > 0.0 for row in record["rows"])
    assert lines_of(record, 2) == ["quick", "standard", "thorough"]


@pytest.mark.slow("graph")
def test_ridges_and_types_of_a_model_have_their_rows_and_lines(measured: Callable[..., dict[str, Any]]) -> None:
    measured("--efforts", "quick", "--what", "ridges")
    record = measured("--what", "precisions") | {"rows": []}
    assert [row["ridge"] for row in record["ridges"]] == [*efforts.RIDGES, None]
    assert len({row["error"] for row in record["ridges"]}) == 4
    fp16, int8 = record["precisions"]
    assert 0.0 < fp16["error"] < int8["error"] < 0.5
    assert lines_of(record, 3)[:4] == ["0.0001", "0.001", "0.01", "halves"]
    assert lines_of(record, 1)[4:] == ["fp16", "int8"]
