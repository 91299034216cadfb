"""From a failing link to the block that breaks it: both sides are run block by block on a few inputs and compared."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import ModelProto
from torch import nn

from ground.feeds import Feeds

from . import block_outputs
from .locate import FaultLocation, block_errors, locate, noise_of
from .tolerance import exact


def block_noise(dense_fp32: ModelProto, dense_fp16: ModelProto, feeds: Feeds) -> dict[str, float]:
    """Each block's own FP16 noise, of the dense model, by key."""
    fp32, fp16 = (block_outputs.outputs_of_graph(graph, feeds) for graph in (dense_fp32, dense_fp16))
    return noise_of(fp32, fp16)


def locate_in_fp16(
    link: str, fp32: ModelProto, fp16: ModelProto, feeds: Feeds, *, noise: Mapping[str, float], fix_command: str = ""
) -> FaultLocation:
    """Where an FP16 or mixed graph leaves its FP32 twin. `fix_command` is the command that helps, with `{site}` in it.

    A few inputs do (8 to 32): those on which the link failed worst. Raises BadInput when the graphs share no block.
    """
    sides = [block_outputs.outputs_of_graph(graph, feeds) for graph in (fp32, fp16)]
    activations = block_outputs.by_site(fp32, block_outputs.largest_activations(fp32, feeds))
    return locate(link, block_errors(*sides, noise=noise), activations=activations, fix_command=fix_command)


def locate_in_exact(link: str, model: nn.Module, graph: ModelProto, feeds: Feeds, *, products: int) -> FaultLocation:
    """Where a float32 graph leaves the torch model that it was exported from. Raises BadInput as above."""
    sides = block_outputs.outputs_of_module(model, feeds), block_outputs.outputs_of_graph(graph, feeds)
    bound = exact(products=products, largest_logit=0.0).max_relative_error
    assert bound is not None
    return locate(link, block_errors(*sides, noise=bound), activations={}, factor=1.0)
