"""What shapes a graph beside its precision, as it is said on the command line."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

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


graph_options = value_options(
    "graphs",
    GraphChoice,
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
)
