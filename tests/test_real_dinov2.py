"""Real weights and photographs out of packages: the assembled model is the graph's own, the crops are split rightly."""

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import ImageNetInfo

from benchmarks.real import lite0, photographs, resources, weights
from benchmarks.real.head import load_head
from benchmarks.real.place import ROOT, assembled, wheels
from calib.fingerprints import are_alike, perceptual_hashes
from corp_deploy.store.checkpoint import dense_from_architecture
from ground.errors import Missing

pytestmark = pytest.mark.nightly

T = TypeVar("T")


def there(get: Callable[[], T]) -> T:
    try:
        return get()
    except Missing as reason:
        pytest.skip(str(reason).replace(str(ROOT), ".venv/real"))


@pytest.fixture(scope="module")
def graph() -> Path:
    return there(weights.graph_file)


@pytest.mark.slow("models")
def test_model_and_head_equal_the_graph(graph: Path, tmp_path: Path) -> None:
    onnx_model = onnx.load(graph)
    model: Any = dense_from_architecture(weights.ARCHITECTURE)
    model.load_state_dict(weights.backbone(onnx_model))
    save_file(weights.head(onnx_model), tmp_path / "head.safetensors")
    head = load_head(tmp_path / "head.safetensors")

    held_out = assembled() / "held.npy"
    noise = np.random.default_rng(0).standard_normal((2, 3, 224, 224), dtype=np.float32)
    images = np.concatenate([noise, np.load(held_out, mmap_mode="r")[:2]]) if held_out.is_file() else noise
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {session.get_inputs()[0].name: images})
    with torch.inference_mode():
        saliency = head(model.forward_features(torch.from_numpy(images))[:, 1:]).numpy()

    assert saliency.std() > 0.1
    for own, graphs in zip(saliency, expected[:, 0], strict=True):
        assert np.linalg.norm(own - graphs) <= 1e-5 * np.linalg.norm(graphs)


SETS = photographs.CALIBRATION, photographs.HELD_OUT, photographs.MORE_CALIBRATION, photographs.MORE_HELD_OUT


def test_calibration_and_held_out_photographs_are_disjoint() -> None:
    assert tuple(map(len, SETS)) == (37, 16, 260, 30)
    assert len({name for names in SETS for name in names}) == 343


def test_photographs_have_no_near_duplicates() -> None:
    hashes = []
    for path in there(lambda: photographs.files([name for names in SETS for name in names])):
        with Image.open(path) as picture:
            pixels = torch.from_numpy(np.array(picture.convert("RGB")))
        hashes.append(perceptual_hashes(pixels.permute(2, 0, 1).unsqueeze(0)))
    for number in range(1, len(hashes)):
        assert not bool(are_alike(hashes[number], torch.cat(hashes[:number]))), number


def test_pictures_in_resource_files_are_found_whole(tmp_path: Path) -> None:
    every = dict[str, bytes]()
    for seed, suffix in enumerate(("jpg", "webp", "jpg")):
        noise = np.random.default_rng(seed).integers(0, 255, (40, 50, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(noise).save(file, "JPEG" if suffix == "jpg" else "WEBP")
        every[f"{hashlib.sha256(file.getvalue()).hexdigest()[:8]}.{suffix}"] = file.getvalue()
    parts = [len(each).to_bytes(4, "big") + each for each in every.values()]
    stray = b"\xff\xd8\xff in a text, with no size in front"
    (tmp_path / "some.rcc").write_bytes(b"qres" + parts[0] + stray + parts[1] + b"tail" + parts[2])
    resources.unpack(tmp_path, tmp_path / "out")
    found = {path.name: path.read_bytes() for path in (tmp_path / "out" / "some").iterdir()}
    assert found == every


def test_first_crops_cover_photographs_evenly() -> None:
    order = photographs.rounds(512, 37, seed=0)
    for count in (37, 128, 256, 512):
        _, times = np.unique(order[:count], return_counts=True)
        assert len(times) == 37
        assert times.max() - times.min() <= 1
    assert list(order[:37]) != sorted(order[:37])


def test_crops_come_from_their_photograph_and_are_preprocessed(tmp_path: Path) -> None:
    colours = {"red.png": (255, 0, 0), "grey.png": (128, 128, 128), "blue.png": (0, 0, 255)}
    for name, colour in colours.items():
        Image.new("RGB", (300, 260), colour).save(tmp_path / name)
    crops = photographs.crops(tuple(colours), 7, seed=3, root=tmp_path)
    assert crops.images.shape == (7, 3, 224, 224)
    assert crops.images.dtype == np.float32
    for image, name in zip(crops.images, crops.photographs, strict=True):
        pixels = image.transpose(1, 2, 0).astype(np.float64) * (0.229, 0.224, 0.225) + (0.485, 0.456, 0.406)
        np.testing.assert_allclose(pixels, np.broadcast_to(np.divide(colours[name], 255.0), pixels.shape), atol=1e-6)
    again = photographs.crops(tuple(colours), 7, seed=3, root=tmp_path)
    np.testing.assert_array_equal(crops.images, again.images)
    with pytest.raises(Missing, match="2 of 3 photographs are not here; `make real` brings them"):
        photographs.crops(("red.png", "lost.png", "gone.png"), 3, seed=0, root=tmp_path)


# EfficientNet-Lite0's weights say of photographs what is on them.


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return there(lite0.state)


@pytest.mark.parametrize(
    ("picture", "said"), [("chelsea.png", "cat"), ("coffee.png", "espresso"), ("rocket.jpg", "missile")]
)
def test_model_classifies_the_photographs(state: dict[str, torch.Tensor], picture: str, said: str) -> None:
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
