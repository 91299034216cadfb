"""How many calibration images a release would have done with, beside reductions made by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from calib.moments import Moments
from corp_deploy import load
from corp_deploy.cli import main
from corp_deploy.families.family import sites_of
from corp_deploy.invocation.method_choice import RIDGE_OF_BEST
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.release.recipe_file import load_recipe
from ground.errors import BadInput
from tests import tiny
from tests.refusals import rejects

RECIPE = """
[model]
model = "dense"
[calibration]
images = "calibration.npy"
batch_size = 5
{calibration}
[held_out]
images = "held-out.npy"
[reduce]
{reduce}
align_mlp = 8
align_head = 8
"""
STAGES = ("recipe", "dense", "moments", "reduce", "size")


def recipe(root: Path, calibration: str, reduce: str = "mlp = 0.5") -> Path:
    path = root / "recipe.toml"
    path.write_text(RECIPE.format(calibration=calibration, reduce=reduce))
    return path


def sized(root: Path, calibration: str, reduce: str = "mlp = 0.5") -> Result:
    words = ["release", recipe(root, calibration, reduce), "-o", root / "out"]
    only = [word for stage in STAGES for word in ("--only", stage)]
    return CliRunner().invoke(main, [str(word) for word in (*words, *only)])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny.written(tmp_path_factory.mktemp("size"), 12, to="calibration.npy")
    np.save(root / "held-out.npy", tiny.images(9, seed=1))
    return root


def by_hand(root: Path, count: int) -> Moments:
    source = tiny.opened(root / "calibration.npy", tiny.images(12))
    return calibrate(tiny.checkpoint(), source.subset(range(count)), batch_size=5)


@pytest.mark.slow("models")
@pytest.mark.parametrize("asked", ["mlp = 0.5\nattn = 0.25", "macs = 0.7"])
def test_every_number_is_judged_at_the_widths_of_the_release(home: Path, asked: str) -> None:
    done = sized(home, "snapshots = [3, 7]", asked)
    assert done.exit_code == 0, done.output
    size = json.loads((home / "out/calibration-size.json").read_text())
    dense, released = load(home / "out/dense"), load(home / "out/reduced")
    widths = {site.name: site.width for site in sites_of(released).every}
    asked_of_best = {"mlp_sparsity": 0.5, "attention_sparsity": 0.25, "ridge_rel": RIDGE_OF_BEST}
    method = method_from_preset("best", **asked_of_best, align_hidden=8, align_head=8)
    images = torch.from_numpy(np.load(home / "held-out.npy"))
    with torch.no_grad():
        right = dense(images).double()
        for point, count in zip(size["points"], (3, 7, 12), strict=True):
            model = reduce(dense, by_hand(home, count), method, widths=widths).model
            error = ((model(images).double() - right).norm(dim=1) / right.norm(dim=1)).mean()
            assert point["images"] == count
            assert point["relative_error"] == pytest.approx(float(error), rel=1e-4)


def test_too_many_images_are_refused_where_they_are_known(home: Path) -> None:
    with pytest.raises(
        BadInput, match=r"snapshots ends at 9, expected less than 9, .*without those of calibration.hold_out"
    ):
        load_recipe(recipe(home, "samples = 11\nhold_out = 2\nsnapshots = [4, 9]"))
    done = sized(home, "snapshots = [4, 12]")
    assert done.exit_code == 2
    assert "calibration.snapshots ends at 12, expected less than 12" in " ".join(done.stderr.split())


def test_snapshots_ascend_and_are_of_fits_to_moments(home: Path) -> None:
    rejects(r"calibration.snapshots is \[7, 3\], expected ascending", load_recipe, recipe(home, "snapshots = [7, 3]"))
    with pytest.raises(BadInput, match=r"closed_loop fits to the images themselves"):
        load_recipe(recipe(home, "snapshots = [3]", "mlp = 0.5\nclosed_loop = true"))
    with pytest.raises(BadInput, match=r"reduce.effort fits to the images themselves"):
        load_recipe(recipe(home, "snapshots = [3]", "mlp = 0.5\neffort = 'standard'"))
