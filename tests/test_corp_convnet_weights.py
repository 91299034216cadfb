"""Weights of convolutional networks: timm's files, and directories of reduced models."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from ground.errors import BadInput
from tests.small_convnets import SIZE, SMALL, checkpoint, error, library, outputs, pixels
from tests.test_corp_convnets import FEW, method, moments

CLASSES = ("resnet50d", "regnety_002", "small_efficientnet", "small_mobilenetv3")


@pytest.mark.slow("models")
@pytest.mark.parametrize("name", FEW)
def test_written_and_read_again(name: str, tmp_path: Path) -> None:
    own = checkpoint(name)
    reduction = reduce(own.model, moments(name), method("best", 0.5))
    save(replace(own, model=reduction.model), tmp_path / "model")
    again = load_checkpoint(tmp_path / "model").model
    state = reduction.model.state_dict()
    assert again.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in again.state_dict().items())
    assert error(again, reduction.model, pixels(2)) < 1e-6


@pytest.mark.parametrize("name", CLASSES)
def test_weights_under_timms_names_are_read(name: str, tmp_path: Path) -> None:
    """With as many classes as they tell apart, and without the classifier where none is asked for."""
    theirs = library(name)
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    kwargs = {"img_size": SIZE, **SMALL[name]}
    own = load_dense(name, weights=tmp_path / "weights.safetensors", kwargs=kwargs)
    assert error(own.model, theirs, pixels(2)) < 1e-5
    assert any("tells 7 classes apart" in note for note in own.notes)
    bare = load_dense(name, weights=tmp_path / "weights.safetensors", kwargs={**kwargs, "num_classes": 0})
    assert any("not used, as the model was built without" in note for note in bare.notes)
    assert outputs(bare.model, pixels(2)).shape[1] > 7


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    save_file(library("resnet18").state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(BadInput, match="these weights don't fit the model"):
        load_dense("resnet18d", weights=tmp_path / "weights.safetensors", kwargs=SMALL["resnet18d"])
