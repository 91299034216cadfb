"""Inputs in memory that Python functions take, and the messages for any other object."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

import corp_deploy
from corp_deploy.api.values import as_file
from tests.refusals import rejects

IMAGES = torch.zeros(4, 3, 8, 8)


class Endless(Dataset[torch.Tensor]):
    """Fails when it is read."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, position: int) -> torch.Tensor:
        raise AssertionError(position)


def generator() -> Iterator[torch.Tensor]:
    yield pytest.fail("it was read")


PICTURE = Image.new("RGB", (8, 8))
OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "a dataset": (Endless, r"inputs: got Endless, expected a path .*; give DataLoader\(DATASET, batch_size=32\)"),
    "nothing": (lambda: None, "inputs: got NoneType, expected a path"),
    "a picture": (lambda: PICTURE, "inputs: got Image, expected a path"),
    "paths": (lambda: ["a.png", Path("b.png")], "inputs: got str; a batch is a tensor or array"),
    "bytes": (lambda: b"images", "inputs: got bytes, expected a path"),
    "unlike images": (lambda: [np.zeros((3, 8, 8)), np.zeros((3, 9, 9))], r"inputs: got list \(.*, expected a path"),
    "objects": (lambda: np.array([None, 1]), "inputs: got ndarray of object, expected a path"),
    "a dict of loaders": (lambda: {"x": generator()}, r"inputs\['x'\]: got generator, expected a path"),
    "an empty dict": (dict, "inputs: got dict that is empty, expected a path"),
    "a dict without names": (lambda: {0: IMAGES}, "inputs: got dict without names, expected a path"),
    "bfloat16": (lambda: IMAGES.bfloat16(), r"inputs: got Tensor \(.*BFloat16\), expected a path"),
    "sparse": (lambda: IMAGES.to_sparse(), r"inputs: got Tensor \("),
    "no values": (lambda: IMAGES.to("meta"), r"inputs: got Tensor \("),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_calibrate_refuses_other_inputs_before_any_work(tmp_path: Path, kind: str) -> None:
    make, said = OTHERS[kind]
    rejects(said, corp_deploy.calibrate, torch.nn.Flatten(), make(), tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


def test_every_function_with_inputs_refuses_a_dataset_without_batches(tmp_path: Path) -> None:
    said = "inputs: got Endless, expected a path"
    every: Any = Endless()
    rejects(said, corp_deploy.verify, torch.nn.Flatten(), tmp_path, every)
    rejects(said, corp_deploy.reduce, torch.nn.Flatten(), tmp_path / "m", tmp_path / "r", inputs=every, macs=0.8)
    rejects(
        said, corp_deploy.export, torch.nn.Flatten(), tmp_path / "x.onnx", precision="mixed", auto=True, inputs=every
    )
    rejects(said, corp_deploy.bench, tmp_path / "a.onnx", tmp_path / "b.onnx", inputs=every)


@pytest.mark.parametrize("values", [IMAGES, IMAGES.numpy(), list(IMAGES), [each.numpy() for each in IMAGES]])
def test_arrays_tensors_and_lists_are_accepted_as_inputs(values: Any) -> None:
    with as_file(values) as path:
        assert np.load(path).shape == (4, 3, 8, 8)
