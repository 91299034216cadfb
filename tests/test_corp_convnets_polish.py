"""A polish of rows of convolutions: by gradients, block by block or as a whole; least squares are refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from corp_deploy.polish.matrices import Matrix, chosen_
from corp_deploy.polish.options import PolishName, PolishOptions
from corp_deploy.polish.polish import Polished, polished
from corp_deploy.polish.walk import blocks
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from ground.errors import BadInput
from tests.small_convnets import checkpoint, error, opened, pixels

NAME = "resnet18d"
PLACES = ("1.0", "2.0", "3.0", "3.1", "4.0")
METHOD = method_from_preset("best", conv_sparsity=0.5, align_conv=8)


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    own = checkpoint(NAME)
    moments = calibrate(own, opened(own.model, 32, tmp_path_factory.mktemp("images")), batch_size=32)
    return reduce(own.model, moments, METHOD).model


def by(how: PolishName, reduced: nn.Module, folder: Path, steps: int) -> Polished:
    dense = checkpoint(NAME).model
    options = PolishOptions(how=how, steps=steps, batch_size=8, views=False)
    return polished(dense, reduced, opened(dense, 32, folder), options)


@pytest.mark.parametrize(("how", "steps"), [("block", 20), ("model", 40)])
def test_it_errs_less_than_what_it_began_with(how: PolishName, steps: int, reduced: nn.Module, tmp_path: Path) -> None:
    result = by(how, reduced, tmp_path, steps)
    assert result.report.error < 0.97 * result.report.error_before
    dense, others = checkpoint(NAME).model, pixels(16, seed=3)
    assert error(result.model, dense, others) < error(reduced, dense, others)
    if how == "block":
        assert [part.part for part in result.report.parts] == ["conv1", *(f"layer{at}" for at in PLACES)]


def test_layers_are_refused_with_the_reason(reduced: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"conv1, layer1\.0.* are rows of convolutions, through which no step is solved"):
        by("layer", reduced, tmp_path, 1)


@pytest.mark.parametrize("how", ["block", "model"])
def test_streams_of_fewer_channels_are_refused(how: PolishName, tmp_path: Path) -> None:
    own = checkpoint(NAME)
    moments = calibrate(own, opened(own.model, 32, tmp_path), statistics=Statistics(residual=True), batch_size=32)
    narrower = reduce(own.model, moments, replace(METHOD, residual_sparsity=0.5)).model
    with pytest.raises(BadInput, match="have fewer channels than the dense model's"):
        by(how, narrower, tmp_path, 1)


def test_a_block_is_one_row_with_its_shortcut(reduced: nn.Module) -> None:
    """Not a stage of several."""
    assert [block.name for block in blocks(reduced)] == ["conv1", *(f"layer{at}" for at in PLACES)]
    by_name = {block.name: block for block in blocks(reduced)}
    names = {matrix.name for matrix in chosen_(reduced, by_name["layer3.0"])}
    assert names == {"layer3.0.conv1", "layer3.0.conv2", "layer3.0.downsample.1"}
    assert {matrix.name for matrix in chosen_(reduced, by_name["conv1"])} == {"conv1.0", "conv1.3", "conv1.6"}
    reduced.requires_grad_(False)


def test_a_convolution_as_a_matrix_goes_there_and_back(reduced: nn.Module) -> None:
    layer = next(matrix.layer for matrix in chosen_(reduced) if matrix.name == "layer2.0.conv1")
    reduced.requires_grad_(False)
    assert layer.bias is not None
    matrix, before, bias = Matrix(name="", layer=layer, scale=1.0), layer.weight.clone(), layer.bias.clone()
    values_OK = matrix.values_OK
    assert values_OK.shape == (len(before), before[0].numel() + 1)
    torch.testing.assert_close(values_OK[:, :-1], before.flatten(1))
    torch.testing.assert_close(values_OK[:, -1], bias)
    matrix.add_(torch.ones_like(values_OK))
    torch.testing.assert_close(layer.weight, before + 1.0)
    torch.testing.assert_close(layer.bias, bias + 1.0)
    matrix.set_(values_OK)
    torch.testing.assert_close(layer.weight, before)
