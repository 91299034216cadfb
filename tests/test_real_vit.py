"""The real encoder's benchmark, on an encoder and crops that take seconds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from benchmarks.quality import subjects
from benchmarks.real import encoder, real_vit
from benchmarks.real.encoder import METHODS
from benchmarks.real.head import SaliencyHead
from benchmarks.real.measures import Outputs, figures, outputs
from benchmarks.real.page import real_vit as table
from benchmarks.real.search import Schedules, Sparsities
from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.spec.merging import Merging
from corp_deploy.store.input_sets import images_for_model
from tests import tiny
from tests.refusals import rejects

pytestmark = pytest.mark.nightly

KWARGS = {"img_size": 32, "patch_size": 8, "num_classes": 0}


def lively_head() -> SaliencyHead:
    """Random weights that find some of each picture salient."""
    torch.manual_seed(0)
    head = SaliencyHead((48, 16, 8)).eval()
    with torch.no_grad():
        head.final_conv.weight.mul_(50.0)
        head.final_conv.weight.sub_(head.final_conv.weight.mean())
    return head


@pytest.fixture
def _ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve crops of three pictures to calibrate on, six of two others, a model and a head."""
    directory = tmp_path / "ready"
    directory.mkdir()
    checkpoint = tiny.checkpoint(**KWARGS)
    monkeypatch.setattr(subjects, "ARCHITECTURE", checkpoint.architecture)
    for module in (subjects, encoder):
        monkeypatch.setattr(module, "assembled", lambda: directory)
    save_file(checkpoint.model.state_dict(), directory / "dinov2_s.safetensors")
    save_file(lively_head().state_dict(), directory / "head.safetensors")
    for name, count, pictures in (("calib", 12, 3), ("held", 6, 2)):
        np.save(directory / f"{name}.npy", tiny.images(count, seed=count))
        names = [f"{name}-{position % pictures}.jpg" for position in range(count)]
        (directory / f"{name}_groups.json").write_text(json.dumps(names))


def run(path: Path, *more: str) -> dict[str, Any]:
    """Run the benchmark and return its record."""
    threads = torch.get_num_threads()
    words = ["--output", str(path), "--crops", "12", "--held-out", "6", "--threads", "1", *more]
    try:
        done = CliRunner().invoke(real_vit.main, words, catch_exceptions=False)
    finally:
        torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    record: dict[str, Any] = json.loads(path.read_text())
    return record


@pytest.mark.slow("models")
@pytest.mark.usefixtures("_ready")
def test_every_method_has_a_row_and_a_table(tmp_path: Path) -> None:
    wanted = ("none", "corp", "best, grouped", "best, by site, closed loop", "merging", "dropping")
    record = run(tmp_path / "r.json", "--shares", "0.8", *(word for name in wanted for word in ("--only", name)))
    rows = {row["method"]: row for row in record["rows"]}
    assert list(rows) == [method.name for method in METHODS if method.name in wanted]
    assert all(row["macs_share"] <= 0.8 for row in rows.values())
    assert all(0.0 < row["class_error"] < 2.0 for row in rows.values())
    assert rows["dropping"]["patch_error"] is None
    assert rows["merging"]["options"]["merge_tokens"]
    record = run(tmp_path / "r.json", "--photographs", "--only", "2", "--only", "5")
    assert [row["photographs"] for row in record["photographs"]] == [5, 5]
    assert f"| none | {rows['none']['class_error']:.3f} |" in table(record)


def test_missing_weights_skip_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "assembled", lambda: tmp_path)
    done = CliRunner().invoke(real_vit.main, ["--output", str(tmp_path / "out.json")])
    assert done.exit_code == 0
    assert "`make real` brings weights and photographs" in done.output
    assert not list(tmp_path.iterdir())


def test_figures_equal_explicit_loops_over_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    class_BC, patches_BNC, saliency_BSS = (
        torch.rand(6, *shape, generator=generator) for shape in ((5,), (4, 5), (3, 3))
    )
    dense, reduced = (
        Outputs(
            class_BC=class_BC + noise * torch.randn(6, 5, generator=generator),
            patches_BNC=patches_BNC + noise * torch.randn(6, 4, 5, generator=generator),
            saliency_BSS=saliency_BSS + noise * torch.randn(6, 3, 3, generator=generator),
        )
        for noise in (0.0, 0.2)
    )
    got = figures(reduced, dense)
    one, other = (np.asarray(each.class_BC, np.float64) for each in (dense, reduced))
    squares = [sum((b - a) ** 2 for a, b in zip(*rows, strict=True)) for rows in zip(one, other, strict=True)]
    assert got["class_error"] == pytest.approx((sum(squares) / sum(a * a for a in one.flat)) ** 0.5)

    neighbours = []
    for rows in (one, other):
        unit = [row / sum(value**2 for value in row) ** 0.5 for row in rows]
        closest = [
            max((place for place in range(6) if place != own), key=lambda place: float(unit[own] @ unit[place]))
            for own in range(6)
        ]
        neighbours.append(closest)
    same = [a == b for a, b in zip(*neighbours, strict=True)]
    assert 0 < sum(same) < 6
    assert got["neighbour_agreement"] == sum(same) / 6

    assert dense.patches_BNC is not None
    assert reduced.patches_BNC is not None
    tokens = [np.asarray(each.patches_BNC, np.float64).reshape(-1, 5) for each in (dense, reduced)]
    cosines = sorted(float(a @ b) / (float(a @ a) * float(b @ b)) ** 0.5 for a, b in zip(*tokens, strict=True))
    assert got["cosine_mean"] == pytest.approx(sum(cosines) / 24)
    assert got["cosine_low"] == pytest.approx(np.quantile(cosines, 0.01))
    assert got["patch_error"] == pytest.approx(np.linalg.norm(tokens[1] - tokens[0]) / np.linalg.norm(tokens[0]))
    maps = [np.asarray(each.saliency_BSS, np.float64) for each in (dense, reduced)]
    salient = [{place for place, value in np.ndenumerate(each) if value > 0.5} for each in maps]
    assert got["saliency_iou"] == len(salient[0] & salient[1]) / len(salient[0] | salient[1])
    assert got["saliency_error"] == pytest.approx(np.linalg.norm(maps[1] - maps[0]) / np.linalg.norm(maps[0]))


@pytest.mark.slow("models")
def test_merged_tokens_are_restored_to_patches_and_dropped_ones_not() -> None:
    model, images = tiny.checkpoint(**KWARGS).model, torch.from_numpy(tiny.images(6))
    head = lively_head()
    dense = outputs(model, images, head)
    assert dense.patches_BNC is not None
    assert dense.patches_BNC.shape == (6, 16, 48)
    nothing = outputs(traced_model.with_merging(model, Merging(schedule=(0, 0))), images, head)
    assert figures(nothing, dense)["patch_error"] < 1e-5
    merged = figures(outputs(traced_model.with_merging(model, Merging(schedule=(4, 4))), images, head), dense)
    assert 0.0 < merged["patch_error"] < 2.0
    assert 0.0 <= merged["saliency_iou"] <= 1.0
    dropping = traced_model.with_merging(model, Merging(schedule=(4, 4), how="drop"))
    dropped = figures(outputs(dropping, images, head), dense)
    assert dropped["patch_error"] is None
    assert dropped["saliency_iou"] is None
    assert dropped["class_error"] > 0.0


def test_smallest_sufficient_uniform_sparsity_is_chosen() -> None:
    sparsities = Sparsities(tiny.checkpoint(**KWARGS, embed_dim=192).model)
    joint = sparsities.of("joint", 0.7)
    assert sparsities.left(joint, joint) <= 0.7 < sparsities.left(joint - 0.01, joint - 0.01)
    rejects(r"no uniform mlp sparsity leaves 0.05 of the MACs", sparsities.of, "mlp", 0.05)


@pytest.mark.slow("models")
def test_fewest_sufficient_merged_tokens_are_chosen() -> None:
    schedules = Schedules(tiny.checkpoint(**KWARGS, depth=4).model)
    for which, start in (("each", ""), ("grow", "grow:")):
        text = schedules.of(which, 0.9)  # type: ignore[arg-type]
        count = int(text.removeprefix(start))
        assert schedules.left(text) <= 0.9 < schedules.left(f"{start}{count - 1}")
    rejects(r"merging 255 tokens leaves more than 0.1 of the MACs", schedules.of, "each", 0.1)


def test_predicted_cost_of_uniform_sparsity_equals_the_count(tmp_path: Path) -> None:
    checkpoint = tiny.checkpoint(**KWARGS)
    np.save(tmp_path / "images.npy", tiny.images(4))
    moments = calibrate(checkpoint, images_for_model(checkpoint.model, tmp_path / "images.npy"), batch_size=4)
    sparsities = Sparsities(checkpoint.model)
    for mlp, attention in ((0.5, 0.5), (0.5, None)):
        method = method_from_preset("none", mlp_sparsity=mlp, attention_sparsity=attention)
        cost = macs(reduce(checkpoint.model, moments, method).model) / macs(checkpoint.model)
        assert sparsities.left(mlp, attention) == pytest.approx(cost)
