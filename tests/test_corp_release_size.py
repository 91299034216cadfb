"""A release's errors by the number of calibration images, compared with single reductions."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result

from calib.moments import Moments
from corp_deploy import load
from corp_deploy.families.family import sites_of
from corp_deploy.invocation.method_choice import RIDGE_OF_BEST
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.release.recipe_file import load_recipe
from tests import tiny
from tests.command import invoked
from tests.recipes import recipe
from tests.refusals import rejects

Table = Mapping[str, Any]
MLP: Table = {"mlp": 0.5}
STAGES = ("recipe", "dense", "moments", "reduce", "size")


def write_recipe(root: Path, calibration: Table, reduce: Table) -> Path:
    path, aligned = root / "recipe.toml", {"align_mlp": 8, "align_head": 8}
    path.write_text(recipe({"calibration": {"batch_size": 5, **calibration}, "reduce": {**aligned, **reduce}}))
    return path


def run_stages(root: Path, calibration: Table, reduce: Table, *, code: int = 0) -> Result:
    only = [word for stage in STAGES for word in ("--only", stage)]
    return invoked("release", write_recipe(root, calibration, reduce), "-o", root / "out", *only, code=code)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny.written(tmp_path_factory.mktemp("size"), 12, to="calibration.npy")
    np.save(root / "held-out.npy", tiny.images(9, seed=1))
    return root


def moments_of_first(root: Path, count: int) -> Moments:
    source = tiny.opened(root / "calibration.npy", tiny.images(12))
    return calibrate(tiny.checkpoint(), source.subset(range(count)), batch_size=5)


@pytest.mark.slow("models")
@pytest.mark.parametrize("asked", [{"mlp": 0.5, "attn": 0.25}, {"macs": 0.7}])
def test_every_snapshot_is_judged_at_the_widths_of_the_release(home: Path, asked: Table) -> None:
    run_stages(home, {"snapshots": [3, 7]}, asked)
    size = json.loads((home / "out/calibration-size.json").read_text())
    dense, released = load(home / "out/dense"), load(home / "out/reduced")
    widths = {site.name: site.width for site in sites_of(released).every}
    asked_of_best = {"mlp_sparsity": 0.5, "attention_sparsity": 0.25, "ridge_rel": RIDGE_OF_BEST}
    method = method_from_preset("best", **asked_of_best, align_hidden=8, align_head=8)
    images = torch.from_numpy(np.load(home / "held-out.npy"))
    with torch.no_grad():
        right = dense(images).double()
        for point, count in zip(size["points"], (3, 7, 12), strict=True):
            model = reduce(dense, moments_of_first(home, count), method, widths=widths).model
            error = ((model(images).double() - right).norm(dim=1) / right.norm(dim=1)).mean()
            assert point["images"] == count
            assert point["relative_error"] == pytest.approx(float(error), rel=1e-4)


def test_more_images_than_available_are_refused(home: Path) -> None:
    few = {"samples": 11, "hold_out": 2, "snapshots": [4, 9]}
    said = "snapshots ends at 9, expected less than 9, .*without those of calibration.hold_out"
    rejects(said, load_recipe, write_recipe(home, few, MLP))
    message = " ".join(run_stages(home, {"snapshots": [4, 12]}, MLP, code=2).stderr.split())
    assert "calibration.snapshots ends at 12, expected less than 12" in message


@pytest.mark.parametrize(
    ("snapshots", "asked", "message"),
    [
        ([7, 3], {}, r"calibration.snapshots is \[7, 3\], expected ascending"),
        ([3], {"closed_loop": True}, "closed_loop fits to the images themselves"),
        ([3], {"effort": "standard"}, r"reduce.effort fits to the images themselves"),
    ],
)
def test_snapshots_must_ascend_and_need_fits_to_moments(
    snapshots: list[int], asked: Table, message: str, home: Path
) -> None:
    rejects(message, load_recipe, write_recipe(home, {"snapshots": snapshots}, {**MLP, **asked}))
