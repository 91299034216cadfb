"""Labels in every form are the same class indices, and what is no label is refused in one message."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from calib.images import Images
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.judging import judges_from_choice, top_k_accuracy
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.store.labels import labels_for
from perf.parity.labels import accuracy_on_labels
from tests import tiny
from tests.refusals import rejects

NAMES = ("cat/0.png", "cat/1.png", "dog/0.png", "dog/9.png")
CLASSES = [3, 0, 6, 1]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """Return a model with seven classes."""
    return tiny.checkpoint().model


@pytest.fixture(scope="module")
def images(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Images:
    root = tmp_path_factory.mktemp("photos")
    for name in NAMES:
        (root / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(root / name)
    return images_for_model(model, root)


@pytest.mark.parametrize(
    "values",
    [
        CLASSES,
        tuple(CLASSES),
        np.array(CLASSES, np.uint8),
        torch.tensor(CLASSES),
        torch.tensor(CLASSES, dtype=torch.float32, requires_grad=True),
        [torch.tensor(each) for each in CLASSES],
        np.eye(7, dtype=bool)[CLASSES],
        nn.functional.one_hot(torch.tensor(CLASSES), 7),
        np.array(CLASSES)[:, None],
        dict(zip(NAMES, CLASSES, strict=True)),
    ],
    ids=lambda values: type(values).__name__,
)
def test_labels_in_memory_are_accepted(model: nn.Module, images: Images, values: Any) -> None:
    assert labels_for(values, images, model).tolist() == CLASSES


FILES = {
    "a.txt": "3\n0\n6\n1\n",
    "names.txt": "".join(f"{name} {label}\n" for name, label in zip(NAMES, CLASSES, strict=True)),
    "a.csv": "label\n3\n0\n6\n1\n",
    "float.csv": "3.0\n0.0\n6.0\n1.0\n",
    "names.csv": "label,file\n" + "".join(f"{c},{n}\n" for n, c in zip(NAMES[::-1], CLASSES[::-1], strict=True)),
    "index.csv": ",image,target\n" + "".join(f"{i},./{NAMES[i]},{CLASSES[i]}\n" for i in range(4)),
    "bare.csv": "cat/0.png;3\ncat/1.png;0\ndog/0.png;6\ndog/9.png;1\n",
    "a.tsv": "id\tclass\n" + "".join(f"data/{n}\t{c}\n" for n, c in zip(NAMES, CLASSES, strict=True) if "0" not in n)
    + "cat/0.png\t3\ndog/0.png\t6\n",
    "a.json": json.dumps(CLASSES),
    "under.json": json.dumps({"labels": CLASSES}),
    "names.json": json.dumps(dict(zip(NAMES, CLASSES, strict=True)) | {"other.png": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_label_files_are_accepted(model: nn.Module, images: Images, tmp_path: Path, name: str, mark: str) -> None:
    (tmp_path / name).write_text(mark + FILES[name], encoding="utf-8")
    assert labels_for(tmp_path / name, images, model).tolist() == CLASSES


def test_named_labels_of_a_sample_need_only_its_images(model: nn.Module, images: Images) -> None:
    drawn = images.subset([1, 3])
    assert labels_for({"cat/1.png": 5, "9": 2}, drawn, model).tolist() == [5, 2]
    assert labels_for(CLASSES, drawn, model).tolist() == [0, 1]


def test_labels_by_folder_follow_a_table_or_the_sorted_order(model: nn.Module, images: Images) -> None:
    assert labels_for({"cat": 4, "dog": 2}, images, model).tolist() == [4, 4, 2, 2]
    said = r"2 folders \(cat, dog\) for 7 classes, so which class each stands for is not known; give a \.json file"
    rejects(said, labels_for, Path("folders"), images, model)
    told = list[str]()
    assert labels_for("folders", images, with_classes(model, 2), told.append).tolist() == [0, 0, 1, 1]
    assert told == ["labels by folders: cat is 0, dog is 1"]


def with_classes(model: nn.Module, classes: int) -> nn.Module:
    return tiny.checkpoint(num_classes=classes).model if model else model


@pytest.mark.parametrize(
    "values", [[0, 1, 1, 0], [False, True, True, False], torch.tensor([[0.0], [1.0], [1.0], [0.0]])]
)
def test_single_logit_model_takes_labels_0_and_1(images: Images, model: nn.Module, values: Any) -> None:
    one = with_classes(model, 1)
    assert labels_for(values, images, one).tolist() == [0, 1, 1, 0]
    assert labels_for("folders", images, one).tolist() == [0, 0, 1, 1]
    rejects(r"labels from -1 to 1, expected 0 to 1: the model has one logit", labels_for, [-1, 1, 1, -1], images, one)


def test_single_logit_is_judged_by_its_sign() -> None:
    logits, labels = np.array([[-1.0], [2.0], [0.5], [3.0]], np.float32), np.array([0, 1, 0, 1])
    assert accuracy_on_labels("dense", logits, labels).correct == 3
    assert (top_k_accuracy(logits, labels, 1), top_k_accuracy(logits, labels, 5)) == (0.75, 1.0)


BAD: dict[str, tuple[Any, str]] = {
    "too few": ([1, 2], r"labels: 2 labels for 4 images; give one label an image"),
    "out of range": ([0, 1, 2, 7], r"labels from 0 to 7, expected 0 to 6: class indices in the order of the model's 7"),
    "fractions": ([0.5, 1, 2, 3], r"float64 \[4\] with fractions"),
    "NaN": ([np.nan, 1, 2, 3], "with fractions"),
    "probabilities": (np.full((4, 7), 1 / 7), "class indices, not probabilities"),
    "two of a row": (np.ones((4, 7), int), "of each row one is 1"),
    "of other classes": (np.eye(4, dtype=int), "of each row one is 1"),
    "words": (["cat", "dog", "cat", "dog"], r"expected whole numbers \[N\]"),
    "unlike rows": ([[1], [1, 2]], "of unlike values"),
    "nothing": ([], "expected whole numbers"),
    "no value": (None, "expected whole numbers"),
    "other names": ({"x.png": 1}, r"no label for 4 of 4 images, such as cat/0\.png, .*; the labels name x\.png"),
    "an ambiguous file name": ({"0.png": 1, "1.png": 1, "9.png": 1}, "no label for 2 of 4 images"),
}


@pytest.mark.parametrize("kind", BAD)
def test_invalid_label_values_are_refused(images: Images, model: nn.Module, kind: str) -> None:
    values, said = BAD[kind]
    rejects(said, labels_for, values, images, model)


BAD_FILES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "words": ("a.txt", lambda path: path.write_text("cat\ndog\n"), "got 'cat', expected a class index"),
    "empty": ("a.csv", lambda path: path.write_text(""), "holds no labels"),
    "a strange header": (
        "a.csv",
        lambda path: path.write_text("img,cls\n0.png,1\n"),
        "columns img, cls; expected a hea",
    ),
    "a short row": ("a.csv", lambda path: path.write_text("file,label\n0.png\n"), "row 2 has too few columns"),
    "a name twice": ("a.csv", lambda path: path.write_text("a,1\na,2\n"), "'a' has more than one label"),
    "UTF-16": ("a.txt", lambda path: path.write_text("1\n", encoding="utf-16"), "the text is UTF-16, expected UTF-8"),
    "a number": ("a.json", lambda path: path.write_text("3"), "expected a list of class indices"),
    "no array": ("a.npy", lambda path: path.write_text("3"), "expected labels in .npy, or under key labels in .npz"),
    "absent": ("a.csv", lambda path: None, r"no such file, expected labels: \.npy"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_invalid_label_files_are_refused(images: Images, model: nn.Module, tmp_path: Path, kind: str) -> None:
    name, write, said = BAD_FILES[kind]
    write(tmp_path / name)
    rejects(said, labels_for, tmp_path / name, images, model)


@pytest.mark.parametrize("form", [list, torch.tensor, np.array, lambda each: dict(zip(NAMES, each, strict=True))])
def test_reduce_accepts_labels_in_memory(images: Images, model: nn.Module, form: Callable[[list[int]], Any]) -> None:
    choice = ReduceOptions(within="accuracy -1", labels=form(CLASSES))
    assert "labels" in choice.non_default
    judges = judges_from_choice(model, images, choice)
    assert judges is not None
    assert judges.labels_N is not None
    assert judges.labels_N.tolist() == CLASSES
    rejects("--labels have no effect on", ReduceOptions, within="error 0.1", labels=form(CLASSES))
