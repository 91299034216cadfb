"""corp-deploy export."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..console import Output, output_options
from .options import FILE, ModelChoice, Words, model_options

if TYPE_CHECKING:
    from ..attention import Geometry


@click.command("export")
@model_options
@click.option(
    "--output", "-o", type=FILE, required=True, help="ONNX file to write; fp16 goes to NAME.fp16.onnx beside it."
)
@click.option(
    "--precision", type=Words("fp32", "fp16"), default="fp32", show_default=True, help="One or several, with commas."
)
@click.option("--opset", type=click.IntRange(20, 23), default=20, show_default=True, help="ONNX operator set.")
@click.option("--batch", type=click.IntRange(1), default=None, help="Fix the batch size; default: any batch size.")
@click.option(
    "--heads",
    type=click.Choice(["padded", "ragged"]),
    default=None,
    help="Replace the head geometry of a reduced model.",
)
@output_options
def export_command(
    model: ModelChoice,
    output: Path,
    precision: tuple[str, ...],
    opset: int,
    batch: int | None,
    heads: "Geometry | None",
    out: Output,
) -> None:
    """Write typed ONNX graphs of a dense or reduced model.

    Example: corp-deploy export --model reduced -o reduced/model.onnx --precision fp32,fp16
    """
    from ..files import sha256_of_file
    from ..graphs import export_checkpoint, path_for_precision

    checkpoint = model.load()
    written = []
    with out.progress("exporting", len(precision), unit="graphs") as done:
        for index, name in enumerate(precision, start=1):
            path = path_for_precision(output, name)
            export_checkpoint(checkpoint, path, precision=name, opset=opset, batch=batch, geometry=heads)
            written.append(
                {
                    "path": str(path),
                    "precision": name,
                    "sha256": sha256_of_file(path),
                    "size_bytes": path.stat().st_size,
                }
            )
            done(index)
    shown = (f"{row['path']}: {row['precision']}, {int(str(row['size_bytes'])) / 1e6:.2f} MB" for row in written)
    out.result({"written": written}, *shown)
