"""What shapes a graph beside its precision, as it is said on the command line."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from corp_deploy.invocation.table import EXPORT_HEADS
from ground.quantities import OPSET
from ground.quantity import BATCH

from .numbers import Number
from .options import value_options

if TYPE_CHECKING:
    from corp_deploy.families.head_attention import Geometry
    from corp_deploy.store.graph_input import GraphInput


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphChoice:
    """What else shapes a graph; None leaves it as the model has it."""

    opset: int | None
    batch: int | None
    heads: "Geometry | None"
    break_fusion: tuple[str, ...] = ()
    graph_input: "GraphInput" = "float32"


def _graph_choice(break_fusion: tuple[str, ...], **options: Any) -> GraphChoice:
    sites = tuple(site.strip() for text in break_fusion for site in text.split(","))
    if not all(sites):
        raise click.UsageError("--break-fusion names modules, with commas, such as blocks.7.attn,blocks.8")
    return GraphChoice(break_fusion=tuple(dict.fromkeys(sites)), **options)


graph_options = value_options(
    "graphs",
    _graph_choice,
    click.option(
        "--opset",
        type=Number(OPSET),
        default=None,
        help="ONNX operator set; default: 20, or 22 where BF16 needs it, or 23 where norms are operators only there.",
    ),
    click.option("--batch", type=Number(BATCH), default=None, help="Fix the batch size; default: any batch size."),
    click.option(
        "--heads",
        type=click.Choice(["padded", "ragged"]),
        default=None,
        help=f"Replace the head geometry. {EXPORT_HEADS.help('heads')}",
    ),
    click.option(
        "--input",
        "graph_input",
        type=click.Choice(["float32", "uint8"]),
        default="float32",
        show_default=True,
        help="uint8: the graph takes pixels [N,C,H,W], resized and cropped, and normalises them itself: in FP32 "
        "folded into a first convolution that does not pad, else by operators ahead of it.",
    ),
    click.option(
        "--break-fusion",
        multiple=True,
        metavar="SITE",
        help="Keep builders from fusing across what a module gives (blocks.7, blocks.7.attn, blocks.*.mlp) or a node "
        "(blocks.7.attn/Softmax, which ends fused attention): it becomes an output that nobody reads; with commas, or "
        "repeat.",
    ),
)
