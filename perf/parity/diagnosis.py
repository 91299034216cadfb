"""From a failing link to the block that breaks it: both sides are run block by block on a few inputs and compared."""

from collections.abc import Collection, Mapping
from pathlib import Path

from onnx import ModelProto
from torch import nn

from ground.errors import BadInput
from ground.feeds import Feeds
from ground.onnx_file import read_onnx
from ground.precision import FLOAT16, FLOAT32, FloatType

from . import block_outputs
from .block_outputs import by_site, fp16_values, largest_activations
from .locate import FaultLocation, block_errors, locate, noise_of
from .structure import StructuralTest
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
    float_type: FloatType = FLOAT16,
    scaled: Collection[str] = (),
) -> FaultLocation:
    """Where a graph held in fewer bits, or mixed of them, leaves its FP32 twin. `fix_command` is the command that
    helps, with `{site}` in it. `scaled`: sites that are meant to give something else, which is undone behind them.

    A few inputs do (8 to 32): those on which the link failed worst. Raises BadInput when the graphs share no block.
    """
    sides = [block_outputs.outputs_of_graph(graph, feeds) for graph in (fp32, half)]
    activations = block_outputs.by_site(fp32, block_outputs.largest_activations(fp32, feeds))
    every = block_errors(*sides, noise=noise, float_type=float_type)
    errors = [error for error in every if error.site not in scaled]
    return locate(link, errors, activations=activations, fix_command=fix_command, float_type=float_type)


def locate_in_exact(link: str, model: nn.Module, graph: ModelProto, feeds: Feeds, *, products: int) -> FaultLocation:
    """Where a float32 graph leaves the torch model that it was exported from. Raises BadInput as above."""
    sides = block_outputs.outputs_of_module(model, feeds), block_outputs.outputs_of_graph(graph, feeds)
    bound = exact(products=products, largest_logit=0.0).max_relative_error
    assert bound is not None
    return locate(link, block_errors(*sides, noise=bound), activations={}, factor=1.0)


def headroom(candidate: str, fp32: Path, fp16: Path, feeds: Feeds) -> StructuralTest:
    """The largest value, computed in float32 by the graph in `fp32`, among those that the one in `fp16` holds in
    float16; named by site. What reaches the very end of float32 is hidden by a mask: a graph in float16 has the end of
    that type there.

    Both are exports of one model, so that their values have the same names; else BadInput is raised. FAIL over 65,504.
    One graph is in memory at a time.
    """
    fp16_names = fp16_values(read_onnx(fp16))
    graph = read_onnx(fp32)
    activations = largest_activations(graph, feeds)
    if 2 * len(fp16_names & activations.keys()) < len(fp16_names):
        raise BadInput(
            f"{candidate}: its values are not named as those of the float32 graph; export both from one model"
        )
    largest = {name: value for name, value in activations.items() if name in fp16_names and value != FLOAT32.largest}
    sites = by_site(graph, largest)
    site, value = max(sites.items(), key=lambda item: item[1], default=("no site", 0.0))
    reason = f"{site} reaches {value:,.6g} in float16, which ends at {FLOAT16.largest:,.0f}"
    return StructuralTest(
        candidate=candidate,
        test="headroom",
        status="PASS" if value <= FLOAT16.largest else "FAIL",
        value=value,
        bound=FLOAT16.largest,
        reason=reason,
    )
