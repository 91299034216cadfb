"""From a failing link to the block that breaks it: both sides are run block by block on a few inputs and compared."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from onnx import ModelProto
from torch import nn

from ground.feeds import Feeds
from ground.precision import FLOAT16, FloatType

from . import block_outputs
from .locate import FaultLocation, block_errors, locate, noise_of
from .tolerance import exact


def block_noise(dense_fp32: ModelProto, dense_half: ModelProto, feeds: Feeds) -> dict[str, float]:
    """Each block's own noise in sixteen bits, of the dense model, by key."""
    fp32, half = (block_outputs.outputs_of_graph(graph, feeds) for graph in (dense_fp32, dense_half))
    return noise_of(fp32, half)


def locate_in_half(
    link: str,
    fp32: ModelProto,
    half: ModelProto,
    feeds: Feeds,
    *,
    noise: Mapping[str, float],
    fix_command: str = "",
    held_in: FloatType = FLOAT16,
    scaled: Collection[str] = (),
) -> FaultLocation:
    """Where a graph held in fewer bits, or mixed of them, leaves its FP32 twin. `fix_command` is the command that
    helps, with `{site}` in it. `scaled`: sites that are meant to give something else, which is undone behind them.

    A few inputs do (8 to 32): those on which the link failed worst. Raises BadInput when the graphs share no block.
    """
    sides = [block_outputs.outputs_of_graph(graph, feeds) for graph in (fp32, half)]
    activations = block_outputs.by_site(fp32, block_outputs.largest_activations(fp32, feeds))
    every = block_errors(*sides, noise=noise, held_in=held_in)
    errors = [error for error in every if error.site not in scaled]
    return locate(link, errors, activations=activations, fix_command=fix_command, held_in=held_in)


def locate_in_exact(link: str, model: nn.Module, graph: ModelProto, feeds: Feeds, *, products: int) -> FaultLocation:
    """Where a float32 graph leaves the torch model that it was exported from. Raises BadInput as above."""
    sides = block_outputs.outputs_of_module(model, feeds), block_outputs.outputs_of_graph(graph, feeds)
    bound = exact(products=products, largest_logit=0.0).max_relative_error
    assert bound is not None
    return locate(link, block_errors(*sides, noise=bound), activations={}, factor=1.0)
