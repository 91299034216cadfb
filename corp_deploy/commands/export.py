"""corp-deploy export."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from corp_deploy.invocation.table import EXPORT, EXPORT_HEADS
from corp_deploy.views.console import Output
from ground.quantities import OPSET
from ground.quantity import BATCH

from .numbers import Number
from .options import (
    ANY_PATH,
    FILE,
    ModelChoice,
    Words,
    given_options,
    model_options,
    output_options,
    samples_option,
    seed_option,
)

if TYPE_CHECKING:
    from corp_deploy.families.head_attention import Geometry
    from corp_deploy.store.checkpoint import Checkpoint


@click.command("export")
@model_options
@click.option(
    "--output",
    "-o",
    type=FILE,
    required=True,
    help="ONNX file to write; of several precisions fp32 goes there, others to NAME.fp16.onnx and so on beside it.",
)
@click.option(
    "--precision",
    type=Words("fp32", "fp16", "mixed"),
    default="fp32",
    show_default=True,
    help="One or several, with commas.",
)
@click.option(
    "--keep-fp32", multiple=True, help="Modules that mixed keeps in FP32, with all below them, such as blocks.7."
)
@click.option("--auto", is_flag=True, help="Let mixed find the blocks that break in FP16, on --images.")
@click.option("--images", type=ANY_PATH, default=None, help="Images for --auto.")
@samples_option
@seed_option
@click.option("--dense", default=None, help="For --auto: the dense model's directory; its FP16 error is the yardstick.")
@click.option(
    "--opset",
    type=Number(OPSET),
    default=None,
    help="ONNX operator set; default: 20, or 23 where the model's norms are operators only there.",
)
@click.option("--batch", type=Number(BATCH), default=None, help="Fix the batch size; default: any batch size.")
@click.option(
    "--heads",
    type=click.Choice(["padded", "ragged"]),
    default=None,
    help=f"Replace the head geometry. {EXPORT_HEADS.help('heads')}",
)
@output_options
def export_command(
    model: ModelChoice,
    output: Path,
    precision: tuple[str, ...],
    keep_fp32: tuple[str, ...],
    auto: bool,
    images: Path | None,
    samples: int | None,
    seed: int,
    dense: str | None,
    opset: int | None,
    batch: int | None,
    heads: "Geometry | None",
    out: Output,
) -> None:
    """Write typed ONNX graphs of a dense or reduced model.

    Example: corp-deploy export --model reduced -o reduced/model.onnx --precision fp32,fp16
    """
    from corp_deploy.families.family import sites_of
    from corp_deploy.store.onnx_file import export_checkpoint, facts_of_onnx, paths_by_precision
    from ground.files import sha256_of_file

    _refuse_mixed_options(precision, keep_fp32, auto, images)
    checkpoint = model.load(out)
    uneven = any(site.qk != site.v for site in sites_of(checkpoint.model).heads)
    EXPORT_HEADS.refuse([(model.model, "uneven" if uneven else "even")], given_options())
    written: list[dict[str, Any]] = []
    kept: tuple[str, ...] = keep_fp32
    paths = paths_by_precision(output, precision)
    with out.progress("exporting", len(precision), unit="graphs") as done:
        if auto:
            assert images is not None
            kept = _kept(checkpoint, dense, images, samples, seed, opset, heads)
            paths = paths if kept else _without_mixed(paths, output)
        for index, (name, path) in enumerate(paths.items(), start=1):
            patterns = kept if name == "mixed" else ()
            export_checkpoint(
                checkpoint, path, precision=name, opset=opset, batch=batch, keep_fp32=patterns, geometry=heads
            )
            size = path.stat().st_size
            made = {"path": str(path), "precision": name, "opset": facts_of_onnx(path).opset}
            written.append({**made, "sha256": sha256_of_file(path), "size_bytes": size})
            done(index)
    if heads == "ragged":
        out.warn("ragged heads lose the fused attention kernel in TensorRT engines; padded heads keep it")
    shown = [
        f"{row['path']}: {row['precision']}, opset {row['opset']}, {row['size_bytes'] / 1e6:.2f} MB" for row in written
    ]
    if auto and kept:
        shown.append(f"kept in FP32: {', '.join(kept)}")
    elif auto:
        shown.append("nothing had to be kept in FP32 on these images, so the graph is fp16, not mixed")
        if ".mixed" in output.suffixes:
            out.warn(f"{output}: an fp16 graph, although its name says mixed")
    out.result({"written": written, "kept_fp32": list(kept)}, *shown)


def _refuse_mixed_options(
    precision: tuple[str, ...], keep_fp32: tuple[str, ...], auto: bool, images: Path | None
) -> None:
    mixed = "mixed-auto" if auto else "mixed"
    EXPORT.refuse([("", mixed if name == "mixed" else name) for name in precision], given_options())
    if "mixed" in precision and bool(keep_fp32) == auto:
        raise click.UsageError("mixed needs either --keep-fp32 PATTERN or --auto")
    if auto != (images is not None):
        raise click.UsageError("--auto looks for the blocks on real images; give --auto and --images together")


def _without_mixed(paths: "dict[str, Path]", output: Path) -> "dict[str, Path]":
    """The same with an fp16 graph in place of the mixed one, which has nothing to keep."""
    from corp_deploy.store.onnx_file import paths_by_precision

    if len(paths) == 1:
        return {"fp16": output}
    return {name: path for name, path in paths_by_precision(output, (*paths, "fp16")).items() if name != "mixed"}


def _kept(
    checkpoint: "Checkpoint",
    dense: str | None,
    images: Path,
    samples: int | None,
    seed: int,
    opset: int | None,
    heads: "Geometry | None",
) -> tuple[str, ...]:
    from corp_deploy.proof.chain import given_from_images
    from corp_deploy.proof.mixed_precision import sites_to_keep
    from corp_deploy.store.dense_model import model_of_directory
    from corp_deploy.store.inputs import images_for_model

    source = images_for_model(checkpoint.model, images, samples=samples, seed=seed)
    yardstick = checkpoint if dense is None else model_of_directory(Path(dense))
    pixels = given_from_images(source).pixels
    return sites_to_keep(checkpoint, yardstick, pixels, opset=opset, geometry=heads).kept
