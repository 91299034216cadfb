"""Dense heads apart in the parity chain: their maps behind every step, with limits of their own, in a release too."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from export.graph.to_onnx import onnx_from_model, save
from ground.ports import OutputPort, Port, Role
from tests.command import invoked, refuses
from tests.test_corp_named_outputs_cli import RECIPE, done

PATCHES = Port(name="patches", shape=(16, 48))


class Saliency(nn.Module):
    """[B,16,48] -> [B,8,8] in [0,1]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.ConvTranspose2d(48, 1, 2, stride=2)

    def forward(self, patches: Tensor) -> Tensor:
        return torch.sigmoid(self.up(patches.transpose(1, 2).unflatten(2, (4, 4)))).squeeze(1)


class Segmentation(nn.Module):
    """[B,16,48] -> [B,5,4,4]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.classes = nn.Linear(48, 5)

    def forward(self, patches: Tensor) -> Tensor:
        maps: Tensor = self.classes(patches).transpose(1, 2).unflatten(2, (4, 4))
        return maps


def write_head(
    module: nn.Module, path: Path, *, port: Port = PATCHES, role: Role = "feature map", batch: int | None = None
) -> None:
    outputs = [OutputPort(name="map", role=role)]
    save(onnx_from_model(module.eval(), [port], outputs, precision="fp32", batch=batch, metadata={}), path)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = done(tmp_path_factory.mktemp("heads"))
    write_head(Saliency(), home / "saliency.onnx")
    write_head(Segmentation(), home / "classes.onnx", batch=4)
    return home


def verify(home: Path, *more: Any, code: int = 0) -> Any:
    steps = [home / "reduced", home / "reduced" / "model.onnx", home / "reduced" / "model.fp16.onnx"]
    dense = (home / "dense", "--outputs", "block0,class,patches")
    held_out = ("--images", home / "held-out.npy", "--batch", "1,5", "-o", home / "parity.json")
    result = invoked("verify", *dense, *steps, *held_out, *more, code=code)
    return json.loads((home / "parity.json").read_text()) if code < 2 else result


def patches_of(graph: Path, images: Any) -> Any:
    session = ort.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    return session.run(["patches"], {"images": images})[0]


@pytest.mark.slow("graph")
def test_maps_of_every_step_are_links_with_error_and_overlap(home: Path) -> None:
    heads = ("--head", home / "saliency.onnx", "--head", home / "classes.onnx")
    limits = ("--max-error", 2.0, "--max-map-error", 2.0, "--min-iou", 0.05, "--min-pixels", 0.05)
    parity = verify(home, *heads, *limits)
    links = {link["name"]: link for link in parity["links"]}
    assert len(links) == 4 * 5, "reduced, FP32, FP16 and the whole chain, each by output and by map"
    assert [head["maps"] for head in parity["heads"]] == [["saliency"], ["classes"]]
    assert parity["heads"][0]["reads"] == ["patches"]
    exact = {name: link for name, link in links.items() if link["kind"] == "exact"}
    assert {link["status"] for link in exact.values()} == {"PASS"}
    assert ["14 products" in link["tolerance"]["rule"] for link in exact.values()] == [False] * 3 + [True] * 2

    images = np.load(home / "held-out.npy")
    dense_session = invoked("export", "--model", home / "dense", "--outputs", "class,patches", "-o", home / "d.onnx")
    assert dense_session.exit_code == 0
    with torch.inference_mode():
        patches = [
            torch.from_numpy(patches_of(path, images)) for path in (home / "d.onnx", home / "reduced/model.onnx")
        ]
        dense, reduced = (Saliency()(each).double().numpy() for each in patches)
        dense_classes, reduced_classes = (Segmentation()(each).argmax(dim=1).numpy() for each in patches)
    told = links["reduced saliency"]["measures"]
    assert told["relative_error"] == pytest.approx(np.linalg.norm(reduced - dense) / np.linalg.norm(dense), rel=1e-4)
    both, either = (dense > 0.5) & (reduced > 0.5), (dense > 0.5) | (reduced > 0.5)
    assert told["iou"] == pytest.approx(both.sum() / either.sum(), abs=0.01)
    assert 0.1 < told["iou"] < 1.0
    of_classes = links["reduced classes"]["measures"]
    assert of_classes["pixel_agreement"] == pytest.approx((dense_classes == reduced_classes).mean(), abs=0.01)
    assert of_classes["threshold"] is None

    with np.load(home / "parity.npz") as by_image:
        assert any(name.startswith("saliency.") and name.endswith(".iou") for name in by_image.files)
    rule = ("gate", home / "parity.json", "--fail-if", "iou@reduced saliency < 0.99", "-o", home / "gate.json")
    invoked(*rule, code=1)
    page = invoked("report", home, "-o", home / "report.md").output
    assert page is not None
    assert "Maps of heads" in (home / "report.md").read_text()


@pytest.mark.slow("models")
def test_limits_of_maps_are_their_own(home: Path) -> None:
    head = ("--head", home / "saliency.onnx")
    strict = verify(home, *head, "--min-iou", 1.0, code=1)
    failed = {link["name"] for link in strict["links"] if link["status"] == "FAIL"}
    assert failed == {"reduced saliency", "whole saliency"}
    free = verify(home, *head, "--max-error", 2.0)
    status = {link["name"]: link["status"] for link in free["links"]}
    assert (status["reduced patches"], status["reduced saliency"]) == ("PASS", "UNJUDGED")
    least, most = (
        {link["name"]: link["measures"]["iou"] for link in verify(home, *head, "--map-threshold", at)["links"][3:4]}
        for at in (0.2, 0.8)
    )
    assert least != most


@pytest.mark.slow("graph")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--min-iou", 0.5), "--min-iou 0.5 is not honoured by no head; it is honoured by a head (--head HEAD.onnx)"),
        (("--head", "reduced/model.onnx"), "reads images, which the model does not give; it gives block0, class, pat"),
        (("--head", "nothing.onnx"), "nothing.onnx: no such ONNX file"),
        (("--head", "patches.onnx"), "heads: patches twice; a map is called as its head's file is"),
        (("--head", "flat.onnx"), "score map: got [16, 48], expected [inputs, height, width] or [inputs, classes"),
    ],
)
def test_heads_that_do_not_fit_are_refused(home: Path, more: tuple[Any, ...], message: str) -> None:
    write_head(Saliency(), home / "patches.onnx")
    if "flat.onnx" in more:
        write_head(Mean(), home / "flat.onnx", role="embedding")
    words = [home / word if str(word).endswith(".onnx") else word for word in more]
    refused = verify(home, *words, code=2)
    assert message in refused.stderr


class Mean(nn.Module):
    def forward(self, patches: Tensor) -> Tensor:
        return patches.mean(dim=1)


@pytest.mark.slow("graph")
def test_a_recipe_has_heads_and_limits_of_their_maps(home: Path) -> None:
    parity = '[parity]\nhead = ["saliency.onnx"]\nmin_iou = 0.05\nmax_map_error = 2.0'
    (home / "recipe.toml").write_text(RECIPE.replace("[parity]", parity))
    invoked("release", home / "recipe.toml", "-o", home / "release")
    record = json.loads((home / "release" / "parity.json").read_text())
    maps = [link for link in record["links"] if link["role"] == "score map"]
    assert {link["status"] for link in maps} == {"PASS"}
    assert "--head ../saliency.onnx --map-threshold 0.5" in (home / "release" / "report.md").read_text()
    assert "saliency.onnx" in (home / "release" / "MODEL_CARD.md").read_text()
    (home / "recipe.toml").write_text(RECIPE.replace("[parity]", "[parity]\nmin_iou = 0.5"))
    refuses("[parity]: --min-iou 0.5 is not honoured by no head", "release", home / "recipe.toml", "-o", home / "x")


class Spread(nn.Module):
    """[B,48] -> [B,1,8,8]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.places = nn.Linear(48, 64)

    def forward(self, features: Tensor) -> Tensor:
        maps: Tensor = self.places(features).unflatten(1, (1, 8, 8))
        return maps


@pytest.mark.slow("graph")
def test_one_output_meets_a_heads_one_input_whatever_they_are_called(home: Path) -> None:
    write_head(Spread(), home / "spread.onnx", port=Port(name="features", shape=(48,)))
    more = ("--images", home / "held-out.npy", "--head", home / "spread.onnx", "--map-threshold", 0, "--min-iou", 1)
    invoked("verify", home / "dense", home / "dense", *more, "-o", home / "alone.json")
    parity = json.loads((home / "alone.json").read_text())
    (maps,) = (link for link in parity["links"] if link["role"] == "score map")
    assert (maps["name"], maps["status"]) == ("dense spread", "PASS")
    assert (maps["measures"]["iou"], maps["measures"]["threshold"]) == (1.0, 0.0)
    assert parity["heads"][0]["reads"] == ["logits"]
