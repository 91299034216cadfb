"""EfficientNet-Lite0's weights say of photographs what is on them, and its benchmark asks what reduce takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from click.testing import CliRunner
from PIL import Image
from timm.data import ImageNetInfo

from benchmarks.real import lite0, real_convnet
from benchmarks.real.convnet_page import real_convnet as page
from benchmarks.real.place import ROOT, wheels
from corp_deploy.store.checkpoint import dense_from_architecture
from ground.errors import Missing
from tests.command import invoked

RECORD = Path(__file__).parents[1] / "benchmarks" / "results" / "real_convnet.json"


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    try:
        return lite0.state()
    except Missing as reason:
        pytest.skip(str(reason).replace(str(ROOT), ".venv/real"))


@pytest.mark.parametrize(
    ("picture", "said"), [("chelsea.png", "cat"), ("coffee.png", "espresso"), ("rocket.jpg", "missile")]
)
def test_it_says_what_photographs_show(state: dict[str, torch.Tensor], picture: str, said: str) -> None:
    files = sorted(wheels().glob(f"skimage/**/{picture}"))
    if not files:
        pytest.skip(f"no {picture}; `make real` brings scikit-image's photographs")
    model = timm.create_model(lite0.ARCHITECTURE.name).eval()
    model.load_state_dict(state)
    transform: Any = timm.data.create_transform(
        (3, 224, 224), mean=(lite0.MEAN,) * 3, std=(lite0.STD,) * 3, crop_pct=0.875, interpolation="bicubic"
    )
    with torch.inference_mode():
        best = int(model(transform(Image.open(files[0]).convert("RGB"))[None]).argmax())
    assert said in ImageNetInfo().index_to_description(best)


def test_without_weights_it_skips_with_the_reason(tmp_path: Path) -> None:
    said = CliRunner().invoke(
        real_convnet.main, ["-o", str(tmp_path / "r.json"), "--ready", str(tmp_path / "ready"), "--work", str(tmp_path)]
    )
    assert said.exit_code == 0
    assert said.output.startswith("skipped: no ")
    assert not (tmp_path / "r.json").exists()


def test_every_row_is_one_that_reduce_takes(tmp_path: Path) -> None:
    """The command gets as far as to the model that isn't there."""
    for row in real_convnet.ROWS:
        widths = ["--macs", "0.5"] if row.budget else ["--conv", "0.5"]
        images = ["--images", __file__] if real_convnet.looks_at_images(row) else []
        words = ["reduce", "--model", str(tmp_path / "none"), "--moments", __file__, *images]
        said = invoked(*words, *row.said.split(), *widths, "--align", "conv=8", "-o", tmp_path, code=2)
        assert "none" in said.output
        assert "Usage" not in said.output


@pytest.mark.slow("models")
def test_the_share_is_the_least_that_meets_the_macs() -> None:
    model = dense_from_architecture(lite0.ARCHITECTURE).requires_grad_(False)
    share = real_convnet.uniform_sparsity(model, 0.66)
    kept = [real_convnet.share_left(model, each) for each in (share - 0.01, share)]
    assert kept[1] <= 0.66 < kept[0]
    assert real_convnet.share_left(model, 0.0) == 1.0


def test_the_page_has_a_line_a_method() -> None:
    text = page(json.loads(RECORD.read_text(encoding="utf-8")))
    for row in real_convnet.ROWS:
        assert f"| {row.name} |" in text
