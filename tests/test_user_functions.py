"""What is said of a user's function: other weights at each call, sizes and preprocessing that are assumed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from corp_deploy.families.given_module import architecture_of_code
from corp_deploy.families.module_facts import facts_of_module
from corp_deploy.families.timm_names import refuse_reserved
from corp_deploy.spec.architecture import Preprocessing
from corp_deploy.spec.trusted_code import Code, trusting_code
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.store.library_model import refuse_other_weights
from corp_deploy.views.inspection import preprocessing_line
from tests.refusals import rejects

SOURCE = """
import torch
from torch import nn
def make(seed=None, size=None):
    if seed is not None:
        torch.manual_seed(seed)
    m = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    if size is not None:
        m.input_size = (3, size, size)
    return m
"""


def made(**arguments: int) -> Checkpoint:
    architecture = architecture_of_code(Code(file="net.py", function="make", source=SOURCE), arguments, Preprocessing())
    lineage = {"source": {"code": "net.py"}}
    return Checkpoint(model=dense_from_architecture(architecture), architecture=architecture, lineage=lineage)


def test_function_with_random_weights_is_refused_without_weights() -> None:
    with trusting_code(True):
        refuse_other_weights(made(seed=0))
        random = made()
        rejects(
            r"isn't deterministic: .* other values of 0.weight.* \(b\) give them with --weights",
            refuse_other_weights,
            random,
        )
        refuse_other_weights(replace(random, lineage={"source": {"code": "net.py", "weights": "w.safetensors"}}))


def test_undeclared_size_and_preprocessing_are_reported_as_assumed(tmp_path: Path) -> None:
    with trusting_code(True):
        silent, saying = made(seed=0), made(seed=0, size=32)
    assert "assumed: the size and ImageNet's mean and std (let the module say `input_size" in preprocessing_line(silent)
    assert preprocessing_line(saying).endswith("; assumed: ImageNet's mean and std (give --mean and --std)")
    given = Preprocessing(mean=(0.5,), std=(0.5,))
    told = replace(saying, architecture=replace(saying.architecture, preprocessing=given))
    assert "assumed" not in preprocessing_line(told)
    np.save(tmp_path / "images.npy", np.zeros((4, 3, 32, 32), np.float32))
    rejects("224.* is assumed.*input_size", images_for_model, silent.model, tmp_path / "images.npy")
    assert images_for_model(saying.model, tmp_path / "images.npy").count == 4


@pytest.mark.parametrize(
    ("indices", "names"), [([0, 2], "feature0_map,feature2_map"), (None, "feature1_map,feature3_map")]
)
def test_features_only_is_refused_with_the_equivalent_outputs(indices: list[int] | None, names: str) -> None:
    kwargs = {"features_only": True} | ({} if indices is None else {"out_indices": indices})
    rejects(f"--outputs {names}$", refuse_reserved, kwargs)


class Fixed(nn.Module):
    """A batch size in its code: in a view, in a buffer, or in what it gives."""

    input_size = (3, 8, 8)

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.cut, self.head = kind, nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 5)
        self.register_buffer("offset", torch.zeros(4, 8))

    def forward(self, images: Tensor) -> Any:
        x = self.cut(images).flatten(2)
        if self.kind == "view":
            return self.head(x.view(1, 8, 4).mean(2))
        if self.kind == "buffer":
            return self.head(x.mean(2) + self.offset)
        return self.head(x.reshape(1, 8, -1).mean(2))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "view",
            r"batch of 1 but .*test_user_functions.py line \d+ \(return self.head\(x.view\(1, 8, 4\).*x.shape\[0\]",
        ),
        ("buffer", r"batch of 4 but .*self.offset.*4, 8"),
        ("output", r"\[1, 5\] for a batch of 2 .*is a batch size written into its code"),
    ],
)
def test_hard_coded_batch_size_is_named_with_its_line(kind: str, said: str) -> None:
    rejects(said, facts_of_module, Fixed(kind), Preprocessing())


def test_hard_coded_batch_size_is_named_without_an_input_size() -> None:
    module = Fixed("buffer")
    module.input_size = None  # type: ignore[assignment]
    rejects("batch of 4 but", facts_of_module, module, Preprocessing())
