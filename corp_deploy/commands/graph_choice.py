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


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphChoice:
    """What else shapes a graph; None leaves it as the model has it."""

    opset: int | None
    batch: int | None
    heads: "Geometry | None"
    break_fusion: tuple[str, ...] = ()


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
        "--break-fusion",
        multiple=True,
        metavar="SITE",
        help="Keep builders from fusing across what a module gives (blocks.7, blocks.7.attn, blocks.*.mlp) or a node "
        "(blocks.7.attn/Softmax, which ends fused attention): it becomes an output that nobody reads; with commas, or "
        "repeat.",
    ),
)
