"""Graphs that take pixels and normalise them inside, in every precision."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

from corp_deploy.families import traced_model
from corp_deploy.families.family import image_spec
from corp_deploy.store.checkpoint import Checkpoint, save
from corp_deploy.store.graph_facts import facts_of_onnx
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.store.onnx_file import AHEAD, export_checkpoint
from corp_deploy.store.quantised_onnx import Quantisation, export_quantised, quantiser_of
from corp_deploy.traced.models.narrowed_model import at_widths
from corp_deploy.traced.programs.exported import CalledModule
from export.engine.record import record_of_plan
from export.graph.pixels import accept_pixels
from ground.pixels import Normalisation
from perf.parity.rounding import round_file
from tests import small_convnets, small_models, tiny
from tests.command import invoked, refuses
from tests.graphs import needs_rtx, session_of
from tests.refusals import rejects

SIZE = 32
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@cache
def photographs(size: int = SIZE) -> NDArray[np.uint8]:
    """Return crops [8,3,size,size] of the two photographs that scikit-learn ships."""
    crops = []
    for picture in load_sample_images().images:
        for top in (20, 180):
            for left in (30, 330):
                crops.append(picture[top : top + size, left : left + size].transpose(2, 0, 1))
    return np.ascontiguousarray(np.stack(crops))


def by_hand(model: nn.Module, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Normalise pixels as torchvision's ToTensor and Normalize do."""
    config = image_spec(model).as_json()
    mean, std = (torch.tensor(config[name])[:, None, None] for name in ("mean", "std"))
    images: NDArray[np.float32] = torch.from_numpy(pixels).float().div(255).sub(mean).div(std).numpy()
    return images


def answers(path: Path, images: NDArray[Any], *, rounded: bool = False) -> NDArray[np.float32]:
    if rounded:
        round_file(path, path.with_suffix(".rounded.onnx"))
        path = path.with_suffix(".rounded.onnx")
    logits: NDArray[np.float32] = session_of(path).run(None, {"images": images})[0]
    return logits


def relative_error(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(one.astype(float) - other) / np.linalg.norm(other))


def read_first(proto: onnx.ModelProto) -> list[str]:
    """Return the operators that read the images, except Shape."""
    return [node.op_type for node in proto.graph.node if "images" in node.input and node.op_type != "Shape"]


@pytest.mark.slow("graph")
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("fp16", 1.05), ("bf16", 1.05)])
def test_pixel_inputs_equal_normalised_inputs(tmp_path: Path, precision: str, bound: float) -> None:
    """In sixteen bits the error is at most 1.05 times that of the graph that takes normalised images."""
    checkpoint = tiny.checkpoint(depth=1)
    pixels = photographs()
    images = by_hand(checkpoint.model, pixels)
    with torch.no_grad():
        exact = checkpoint.model(torch.from_numpy(images)).numpy()
    errors = {}
    for taken, fed in (("float32", images), ("uint8", pixels)):
        path = tmp_path / f"{taken}.onnx"
        export_checkpoint(checkpoint, path, precision=precision, graph_input=taken)  # type: ignore[arg-type]
        errors[taken] = relative_error(answers(path, fed, rounded=precision != "fp32"), exact)
    assert errors["uint8"] < (bound if precision == "fp32" else bound * errors["float32"]), errors
    proto = onnx.load(str(tmp_path / "uint8.onnx"))
    assert read_first(proto) == ["Cast"]
    place = "patch_embed.proj" if precision == "fp32" else AHEAD
    assert facts_of_onnx(tmp_path / "uint8.onnx").normalised == place
    kinds = [node.op_type for node in proto.graph.node if node.name.startswith("pixels/")]
    assert ("Sub" in kinds) == (precision != "fp32")


def test_normalisation_is_folded_into_the_first_convolution() -> None:
    model = tiny.checkpoint(depth=1).model
    spec = image_spec(model)
    made, _ = accept_pixels(model, spec.shape, spec.normalisation)
    own, new = (whole.get_submodule("patch_embed.proj").state_dict() for whole in (model, made))
    config = spec.as_json()
    weight, bias = own["weight"].double().numpy(), own["bias"].double().numpy()
    expected_weight, expected_bias = np.empty_like(weight), bias.copy()
    for channel in range(3):
        mean, std = config["mean"][channel], config["std"][channel]
        expected_weight[:, channel] = weight[:, channel] / (255 * std)
        expected_bias -= weight[:, channel].sum((1, 2)) * mean / std
    np.testing.assert_allclose(new["weight"].numpy(), expected_weight, rtol=1e-6)
    np.testing.assert_allclose(new["bias"].numpy(), expected_bias, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pre_norm", [False, True])  # the convolution of `pre_norm` has no bias
def test_reduced_model_is_folded_in_its_program(pre_norm: bool) -> None:
    checkpoint = tiny.checkpoint(depth=1, pre_norm=pre_norm)
    model = at_widths(checkpoint.model, {"blocks.0.attn.qk": 24, "blocks.0.mlp": 64})
    spec = image_spec(model)
    program = traced_model.exportable(model)
    assert isinstance(program, CalledModule)
    made, folded_into = accept_pixels(program, spec.shape, spec.normalisation)
    assert folded_into == "patch_embed.proj"
    pixels = photographs()
    with torch.no_grad():
        expected = model(torch.from_numpy(by_hand(model, pixels)))
        torch.testing.assert_close(made(torch.from_numpy(pixels)), expected, rtol=1e-5, atol=1e-5)


class Standardised(nn.Conv2d):
    """A convolution that changes its weights as it runs."""

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.conv2d(images, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias, 4)


class Rectified(nn.Conv2d):
    """A convolution followed by an in-place ReLU."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).relu_()


class Stem(nn.Module):
    """A first convolution in a model that may do more with its images, named by `way`."""

    def __init__(self, way: str, **convolution: Any) -> None:
        super().__init__()
        made = {"standardised": Standardised, "rectified": Rectified}.get(way, nn.Conv2d)
        self.first = made(3, 6, 4, stride=4, **convolution)
        self.way = way

    def forward(self, images: Tensor) -> Tensor:
        first: Tensor = self.first(images.contiguous().to(self.first.weight.dtype))
        if self.way == "reads twice":
            return first.mean((2, 3)) + images.mean((1, 2, 3))[:, None]
        if self.way == "runs twice":
            first = first + self.first(torch.relu(images))
        if self.way == "runs on something else too":
            first = first + self.first(self.first.weight.new_ones(1, 3, 4, 4)).mean((2, 3), keepdim=True)
        if self.way == "in place":
            images.sub_(1.0)
        mean: Tensor = first.mean((2, 3))
        return mean


@pytest.mark.parametrize(
    ("way", "convolution", "folded"),
    [
        ("plain", {}, True),
        ("plain", {"bias": False}, True),
        ("plain", {"dilation": 2}, True),
        ("plain", {"padding": 1}, False),
        ("plain", {"padding": "valid"}, True),
        ("plain", {"padding": 2, "padding_mode": "reflect"}, False),
        ("reads twice", {}, False),
        ("runs twice", {}, False),
        ("runs on something else too", {}, False),
        ("standardised", {}, False),
        ("rectified", {}, False),
        ("plain", {"groups": 3}, False),
        ("in place", {}, False),
    ],
)
def test_only_a_plain_convolution_that_alone_reads_the_images_is_folded(
    way: str, convolution: dict[str, Any], folded: bool
) -> None:
    torch.manual_seed(0)
    model = Stem(way, **convolution).eval()
    normalisation = Normalisation(**IMAGENET)
    pixels = photographs()
    with torch.no_grad():
        expected = model(torch.from_numpy(normalisation.images(pixels)))
        for asked in (True, False):
            made, folded_into = accept_pixels(model, (3, SIZE, SIZE), normalisation, folded=asked)
            assert folded_into == ("first" if asked and folded else "")
            torch.testing.assert_close(made(torch.from_numpy(pixels)), expected, rtol=1e-5, atol=1e-6)
    assert model.first.bias is None or model.first.bias.dtype == torch.float32, "the caller's model is unchanged"


@pytest.mark.slow("graph")
@pytest.mark.parametrize(
    ("make", "name", "place"),
    [
        (small_convnets.checkpoint, "resnet18", AHEAD),
        (small_models.small, "convnext_atto", "stem.0"),
    ],
)
def test_padded_stem_pads_with_the_mean_and_not_with_black(
    tmp_path: Path, make: Callable[[str], Checkpoint], name: str, place: str
) -> None:
    """ResNet's stem pads normalised images with zeros, where a fold would pad with pixels of 0; ConvNeXt's has none."""
    checkpoint, path = make(name), tmp_path / "uint8.onnx"
    pixels = photographs(image_spec(checkpoint.model).shape[1])
    export_checkpoint(checkpoint, path, precision="fp32", graph_input="uint8")
    with torch.no_grad():
        exact = checkpoint.model(torch.from_numpy(by_hand(checkpoint.model, pixels))).numpy()
    assert relative_error(answers(path, pixels), exact) < 1e-5
    assert facts_of_onnx(path).normalised == place
    convolution = next(node for node in onnx.load(str(path)).graph.node if node.op_type == "Conv")
    assert len(convolution.input) == 3, "a norm after the stem is folded as before"


@pytest.mark.slow("graph")
@pytest.mark.parametrize("rest", ["fp32", "fp16"])
def test_int8_graph_of_pixels_equals_that_of_images(tmp_path: Path, rest: str) -> None:
    checkpoint = tiny.checkpoint(depth=1)
    pixels = photographs()
    images = by_hand(checkpoint.model, pixels)
    chosen = Quantisation(rest=rest, scales="max")
    given = {}
    for taken, fed in (("float32", images), ("uint8", pixels)):
        path = tmp_path / f"{taken}.onnx"
        made = quantiser_of(checkpoint, {"images": fed}, chosen, graph_input=taken)  # type: ignore[arg-type]
        export_quantised(made, path, precision="int8", chosen=chosen)
        given[taken] = answers(path, fed, rounded=rest == "fp16")
    with torch.no_grad():
        exact = checkpoint.model(torch.from_numpy(images)).numpy()
    errors = {taken: relative_error(each, exact) for taken, each in given.items()}
    assert errors["uint8"] < 1.5 * errors["float32"] < 0.5, errors
    assert facts_of_onnx(tmp_path / "uint8.onnx").normalised == AHEAD


def test_normalisation_round_trips_bit_for_bit() -> None:
    every = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16).repeat(3, 1)
    normalisation = Normalisation(**IMAGENET)
    images = normalisation.images(every)
    mean, std = (torch.tensor(IMAGENET[name])[:, None, None] for name in ("mean", "std"))
    expected = torch.from_numpy(every).float().div(255).sub(mean).div(std).numpy()
    np.testing.assert_array_equal(images, expected)
    np.testing.assert_array_equal(normalisation.pixels(images), every)
    normalisation.require_pixels(images, where="all")
    said = r"here: image 0 is 0\.\d+ away from pixels 0 to 255 normalised by mean 0\.485"
    rejects(said, normalisation.require_pixels, images + 0.005, where="here")
    odd = np.full((1, 3, 2, 2), np.nan, dtype=np.float32)
    rejects("give image files, or uint8 arrays", normalisation.require_pixels, odd, where="here")


def test_pixel_arrays_equal_their_image_files(tmp_path: Path) -> None:
    model = tiny.checkpoint(img_size=SIZE).model
    folder = tmp_path / "photographs"
    folder.mkdir()
    for place, image in enumerate(photographs()):
        Image.fromarray(image.transpose(1, 2, 0)).resize((36, 36), Image.Resampling.BICUBIC).save(
            folder / f"{place}.png"
        )
    files = next(iter(images_for_model(model, folder).batches(99))).numpy()
    pixels = image_spec(model).normalisation.pixels(files)
    np.save(tmp_path / "pixels.npy", pixels)
    arrays = next(iter(images_for_model(model, tmp_path / "pixels.npy").batches(99))).numpy()
    np.testing.assert_array_equal(arrays, files)
    np.save(tmp_path / "sixteen.npy", pixels.astype(np.uint16))
    said = r"got uint16 .* already preprocessed, or uint8 pixels, resized and cropped"
    rejects(said, images_for_model, model, tmp_path / "sixteen.npy")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    save(tiny.checkpoint(depth=1), tmp_path / "dense")
    save(tiny.checkpoint(seed=1, depth=1), tmp_path / "reduced")
    np.save(tmp_path / "pixels.npy", photographs())
    np.save(tmp_path / "images.npy", tiny.images(6))
    return tmp_path


@pytest.mark.slow("graph")
def test_pixel_graph_is_exported_verified_and_timed_by_command(home: Path) -> None:
    for subject in ("dense", "reduced"):
        graph = home / subject / "model.onnx"
        asked = ("--precision", "fp32,fp16", "--input", "uint8", "--json")
        result = invoked("export", "--model", home / subject, "-o", graph, *asked)
        written = json.loads(result.stdout)["written"]
        assert [row["normalised"] for row in written] == ["patch_embed.proj", AHEAD]
    graphs = [home / "dense" / name for name in ("model.onnx", "model.fp16.onnx")]
    invoked("verify", home / "dense", *graphs, "--images", home / "pixels.npy", "-o", home / "parity.json")
    assert json.loads((home / "parity.json").read_text())["links"][0]["measures"]["relative_error"] < 1e-5
    reduced, quick = home / "reduced" / "model.onnx", ("--time-limit", 0.5, "--half-width", 0.9, "--block-ms", 1)
    words = ("-o", home / "bench.json", "--images", home / "pixels.npy", "--batch", 1, *quick, "--min-rounds", 7)
    invoked("bench", home / "dense" / "model.onnx", reduced, *words)
    refuses("uint8", "bench", home / "dense", reduced, "-o", home / "other.json", "--batch", "1")


def test_images_outside_the_pixel_range_are_refused(home: Path) -> None:
    graph = home / "dense" / "model.onnx"
    invoked("export", "--model", home / "dense", "-o", graph, "--input", "uint8")
    words = ("verify", home / "dense", graph, "--images", home / "images.npy", "-o", home / "parity.json")
    refuses("away from pixels 0 to 255", *words)
    invoked("verify", home / "dense", graph, "--random", 5, "-o", home / "parity.json")
    invoked("verify", graph, graph, "--images", home / "pixels.npy", "-o", home / "same.json", "--max-error", 1e-6)
    invoked("verify", graph, graph, "--images", home / "images.npy", "-o", home / "same.json", code=2)


def test_text_encoder_refuses_pixel_inputs(tmp_path: Path) -> None:
    from tests.encoders import write_encoder

    write_encoder(tmp_path / "bert")
    words = ("export", "--model", f"hf:{tmp_path / 'bert'}", "-o", tmp_path / "model.onnx", "--input", "uint8")
    refuses("input uint8 is for models of images, this one takes text", *words)


@needs_rtx
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.slow("engine")
def test_engine_accepts_pixels(tmp_path: Path, precision: str) -> None:
    path = tmp_path / "model.onnx"
    export_checkpoint(tiny.checkpoint(depth=1), path, precision=precision, graph_input="uint8")
    invoked("build", path, "-o", tmp_path / "model.plan", "--backend", "tensorrt-rtx", "--sm", "86", "--batch", "1:4:8")
    assert record_of_plan(tmp_path / "model.plan").inputs[0].dtype == "uint8"
