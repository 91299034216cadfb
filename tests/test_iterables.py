"""Iterables of batches in Python: every function takes them, and results equal those of an array bit for bit."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import corp_deploy
from calib.batch_inputs import BatchInputs
from calib.batches import Batches
from corp_deploy.store.checkpoint import save as save_model
from corp_deploy.store.input_sets import batches_for_model
from ground.pixels import Normalisation
from tests import tiny
from tests.refusals import rejects

IMAGES = torch.from_numpy(tiny.images(18))
LABELS = torch.arange(18) % 3


def tuples() -> DataLoader[Any]:
    return DataLoader(TensorDataset(IMAGES, LABELS), batch_size=4)


def shuffled() -> DataLoader[Any]:
    return DataLoader(TensorDataset(IMAGES, LABELS), batch_size=4, shuffle=True)


def dicts() -> list[dict[str, Any]]:
    return [{"label": y, "image": x} for x, y in tuples()]


def generator() -> Iterator[torch.Tensor]:
    return (x for x, _ in tuples())


RE_ITERABLE: dict[str, Any] = {
    "a loader": tuples,
    "dicts": dicts,
    "tensors": lambda: list(IMAGES.split(5)),
    "arrays": lambda: [IMAGES[:7].numpy(), IMAGES[7:].numpy()],
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("iterables") / "dense"
    save_model(tiny.checkpoint(), path)
    return path


def opened(batches: Any, **how: Any) -> BatchInputs:
    return batches_for_model(tiny.checkpoint().model, Batches(batches), **how)


@pytest.mark.parametrize("kind", [*RE_ITERABLE, "a generator"])
def test_moments_of_batches_equal_those_of_a_file_bit_for_bit(dense: Path, tmp_path: Path, kind: str) -> None:
    np.save(tmp_path / "images.npy", IMAGES.numpy())
    make = {**RE_ITERABLE, "a generator": generator}[kind]
    corp_deploy.calibrate(dense, tmp_path / "images.npy", tmp_path / "file.safetensors", batch_size=8)
    corp_deploy.calibrate(dense, make(), tmp_path / "batches.safetensors", batch_size=8)
    assert (tmp_path / "batches.safetensors").read_bytes() == (tmp_path / "file.safetensors").read_bytes()


def test_every_function_takes_a_loader_and_gives_what_an_array_gives(dense: Path, tmp_path: Path) -> None:
    found = []
    for name, inputs in (("array", IMAGES.numpy()), ("loader", tuples())):
        at = tmp_path / name
        at.mkdir()
        moments = corp_deploy.calibrate(dense, inputs, at / "m.safetensors", hold_out=6, groups="image", samples=16)
        held = moments.held_out
        reduced = corp_deploy.reduce(
            dense, moments, at / "r", inputs=inputs, macs=0.8, hold_out=6, groups="image", samples=16, held_out=held
        )
        parity = corp_deploy.verify(dense, reduced, inputs, hold_out=6, groups="image", samples=16)
        graph = corp_deploy.export(dense, at / "x.onnx", precision="int8", inputs=inputs, rest="fp32")
        found.append(
            (
                (at / "m.safetensors").read_bytes(),
                (at / "r/model.safetensors").read_bytes(),
                parity.links[0].measures,
                graph.sha256,
            )
        )
    assert found[0] == found[1]


def test_bench_and_ship_inputs_are_the_first_rows_of_a_loader(tmp_path: Path) -> None:
    from corp_deploy.api.values import as_file

    with as_file(tuples(), most=6) as path:
        assert np.array_equal(np.load(path), IMAGES[:6].numpy())
    with as_file(dicts(), folder=tmp_path) as path:
        assert np.array_equal(np.load(path), IMAGES.numpy())
        first = Path(str(path)).stat().st_mtime_ns
    with as_file(IMAGES, folder=tmp_path) as path:
        assert Path(str(path)).stat().st_mtime_ns == first
    pair = [{"ids": IMAGES[:, 0, 0, :4], "mask": IMAGES[:, 0, 1, :4]}] * 2
    with as_file(pair) as path:
        assert path.suffix == ".safetensors"


def test_datasets_are_read_by_their_stored_bytes_and_columns_of_numbers_as_batches(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from corp_deploy.api.models import open_inputs
    from corp_deploy.api.values import given_inputs

    model = tiny.checkpoint().model
    numbers = datasets.Dataset.from_dict({"label": LABELS.tolist(), "x": IMAGES.numpy().tolist()})
    numbers = numbers.cast_column("x", datasets.Array3D((3, 32, 32), "float32"))
    (rows,) = open_inputs(model, given_inputs(numbers)).batches(18)
    assert torch.equal(torch.as_tensor(rows), IMAGES)
    pixels = np.random.default_rng(0).integers(0, 256, (5, 40, 40, 3)).astype(np.uint8)
    pictures = [Image.fromarray(each) for each in pixels]
    (tmp_path / "pictures").mkdir()
    for number, each in enumerate(pictures):
        each.save(tmp_path / "pictures" / f"{number}.png")
    paths = [str(tmp_path / "pictures" / f"{number}.png") for number in range(5)]
    stored = datasets.Dataset.from_dict({"image": paths, "label": [0, 1, 2, 0, 1]}).cast_column(
        "image", datasets.Image()
    )
    found = open_inputs(model, given_inputs(stored))
    folder = open_inputs(model, given_inputs(tmp_path / "pictures"))
    assert torch.equal(found.ids, folder.ids)
    assert torch.equal(torch.cat(list(found.batches(2))), torch.cat(list(folder.batches(2))))  # type: ignore[arg-type]


def test_dataset_becomes_a_file_of_its_stored_bytes_and_labels(tmp_path: Path) -> None:
    datasets, pq = pytest.importorskip("datasets"), pytest.importorskip("pyarrow.parquet")
    from corp_deploy.api.values import as_file, given_inputs
    from corp_deploy.store.input_sets import inputs_for_model
    from corp_deploy.store.labels import labels_for

    model = tiny.checkpoint().model
    pixels = np.random.default_rng(0).integers(0, 256, (130, 40, 40, 3)).astype(np.uint8)
    paths = [tmp_path / f"{number}.png" for number in range(130)]
    for path, each in zip(paths, pixels, strict=True):
        Image.fromarray(each).save(path)
    stored = datasets.Dataset.from_dict({"image": [*map(str, paths)], "label": [n % 7 for n in range(130)]})
    stored = stored.cast_column("image", datasets.Image())
    paths[0].unlink()
    for most in (130, 70):
        with as_file(stored, folder=tmp_path, most=most) as file:
            assert isinstance(file, Path)
            images = pq.read_table(file).column("image").to_pylist()
            assert (file.name, len(images), images[0]) == ("inputs.parquet", most, None)
            assert images[most - 1] == paths[most - 1].read_bytes()
            opened_file, kept = inputs_for_model(model, file, max_bad=1), range(1, most)
            assert labels_for(Path("label"), opened_file, model, print).tolist() == [n % 7 for n in range(most)]
            assert torch.equal(opened_file.ids[1:], inputs_for_model(model, given_inputs(stored.select(kept))).ids)
        written = file.stat().st_mtime_ns
        with as_file(stored, folder=tmp_path, most=most):
            assert file.stat().st_mtime_ns == written
    for path in paths[1:]:
        path.unlink()
    rejects("inputs: none of the data set's 130 images can be decoded; check its files", given_inputs, stored)


def test_shuffled_loader_repeats_its_order_and_is_held_out_like_the_plain_one(dense: Path, tmp_path: Path) -> None:
    batches = opened(shuffled())
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader = batches.identified()
    assert torch.equal(torch.get_rng_state(), before)
    plain = opened(tuples()).identified()
    assert not torch.equal(loader.ids, plain.ids)
    assert torch.equal(loader.ids.sort().values, plain.ids.sort().values)
    every = [torch.cat(list(loader.batches(5))) for _ in range(2)]  # type: ignore[arg-type]
    assert torch.equal(*every)
    moments = corp_deploy.calibrate(dense, tuples(), tmp_path / "m.safetensors", hold_out=6)
    reduced = corp_deploy.reduce(dense, moments, tmp_path / "r", mlp=0.5)
    parity = corp_deploy.verify(dense, reduced, shuffled(), hold_out=6, moments=moments)
    assert parity.images.count == 6
    assert parity.fitted is not None
    assert parity.fitted.same == 0
    with_all = corp_deploy.verify(dense, reduced, shuffled())
    assert with_all.fitted is not None
    assert with_all.fitted.same == 12


class Augmented:
    """Batches with noise of torch, NumPy and Python's own generator; `seeded` makes passes differ."""

    def __init__(self, *, differs: bool) -> None:
        self.differs, self.passes = differs, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.passes += 1
        for each in IMAGES.split(6):
            noise = random.random() + np.random.rand() + float(torch.rand(())) + self.differs * self.passes
            yield each + np.float32(noise)


def test_augmented_batches_repeat_and_others_are_refused() -> None:
    batches = opened(Augmented(differs=False)).identified()
    assert torch.equal(*[torch.cat(list(batches.batches(4))) for _ in range(2)])  # type: ignore[arg-type]
    rejects(
        "inputs: image 0 differs from the first pass; .*augmentation",
        lambda: list(opened(Augmented(differs=True)).identified().batches(4)),
    )


def test_generators_are_refused_where_two_passes_are_needed(dense: Path, tmp_path: Path) -> None:
    said = "inputs: a generator yields its batches once"
    m = corp_deploy.calibrate(dense, generator(), tmp_path / "m.safetensors")
    rejects(said, corp_deploy.calibrate, dense, generator(), tmp_path / "o.safetensors", hold_out=3)
    rejects(said, corp_deploy.calibrate, dense, generator(), tmp_path / "o.safetensors", samples=3)
    rejects(said, corp_deploy.calibrate, dense, generator(), tmp_path / "o.safetensors", snapshots=[4])
    rejects(said, corp_deploy.reduce, dense, m, tmp_path / "r", inputs=generator(), macs=0.8)
    reduced = corp_deploy.reduce(dense, m, tmp_path / "r", mlp=0.5)
    assert corp_deploy.verify(dense, reduced, generator()).images.count == 18
    assert not (tmp_path / "o.safetensors").exists()


def test_labels_come_with_tuples_and_named_entries_of_dicts(dense: Path, tmp_path: Path) -> None:
    def accuracy(inputs: Any, labels: Any = None) -> float | None:
        rows = corp_deploy.verify(dense, dense, inputs, labels=labels).accuracy
        return rows[0].accuracy if rows else None

    expected = accuracy(IMAGES, LABELS.numpy())
    assert expected is not None
    assert accuracy(tuples()) == accuracy(dicts(), "label") == expected
    assert accuracy(dicts()) is None
    rejects(
        "a batch has no entry 'target' for labels, only label, image",
        corp_deploy.verify,
        dense,
        dense,
        dicts(),
        labels="target",
    )


def test_pixels_and_pictures_are_normalised_as_the_model_needs() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 3, 32, 32)).astype(np.uint8)
    spec = tiny.checkpoint().model
    (whole,) = opened([pixels]).identified().batches(6)
    from corp_deploy.families.family import image_spec

    normalisation: Normalisation = image_spec(spec).normalisation
    assert np.array_equal(np.asarray(whole), normalisation.images(pixels))
    pictures = [Image.fromarray(each.transpose(1, 2, 0)) for each in pixels]
    transform = image_spec(spec).transform()
    (shown,) = opened([pictures]).identified().batches(6)
    assert torch.equal(shown, torch.stack([transform(each) for each in pictures]))  # type: ignore[arg-type]


def test_rows_that_are_not_finite_are_skipped_as_those_of_a_file(dense: Path, tmp_path: Path) -> None:
    spoilt: NDArray[np.float32] = IMAGES.numpy().copy()
    spoilt[5, 0, 0, 0] = np.nan
    np.save(tmp_path / "images.npy", spoilt)
    rejects(r"inputs\[5\]: holds NaN or Inf", corp_deploy.calibrate, dense, [spoilt], tmp_path / "m.safetensors")
    corp_deploy.calibrate(dense, tmp_path / "images.npy", tmp_path / "file.safetensors", max_bad=1)
    corp_deploy.calibrate(dense, list(torch.from_numpy(spoilt).split(4)), tmp_path / "m.safetensors", max_bad=1)
    assert (tmp_path / "m.safetensors").read_bytes() == (tmp_path / "file.safetensors").read_bytes()


def test_subsets_in_any_order_and_batches_of_any_size_have_the_same_rows() -> None:
    every = opened(tuples()).identified()
    for places in ([3, 4, 9], [17, 0, 5, 4], list(range(18))[::-1]):
        some = every.subset(places)
        for size in (1, 3, 32):
            assert torch.equal(torch.cat(list(some.batches(size))), IMAGES[places])  # type: ignore[arg-type]
        assert torch.equal(some.ids, every.ids[places])


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ([], "inputs: got list without a batch"),
        ([()], "a batch is an empty tuple"),
        ([{}], "a batch has no entry"),
        (["a.png"], "inputs: got str; a batch is a tensor"),
        ([IMAGES.double()], r"inputs: got float64 \[18, 3, 32, 32\], expected float32 \[N,3,32,32\]"),
        ([IMAGES[..., :8]], r"inputs: got float32 \[18, 3, 32, 8\], expected float32"),
        ([IMAGES.bfloat16()], "inputs: got Tensor .*BFloat16"),
        ([IMAGES, (IMAGES * 0).byte()], "batches of float32 and of uint8; give all of one type"),
    ],
)  # fmt: skip
def test_other_batches_are_refused(batches: list[Any], said: str) -> None:
    rejects(said, lambda: opened(batches).identified())
