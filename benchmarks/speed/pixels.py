"""What graphs that take pixels give beside those that take normalised images.

    make real
    python -m benchmarks.speed.pixels --output benchmarks/results/pixels.json

Crops of photographs that nothing was fitted to, as pixels and normalised, through the FP32, FP16 and BF16 graphs of
DINOv2-S, each computed as it is typed and held against the model in float32; then the digits' ViT on digits, and a
ConvNeXt as timm initialises it on random pixels, whose patches are 4 pixels wide. Beside what `export --input uint8`
writes (folded in FP32, normalised ahead in sixteen bits) stands what folding would cost in sixteen bits: `folded`.
"""

import importlib.metadata
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from benchmarks.real.place import assembled
from benchmarks.real.weights import ARCHITECTURE
from corp_deploy.demo.digits.images import load
from corp_deploy.families import traced_model
from corp_deploy.families.family import image_spec, input_ports, output_ports
from corp_deploy.families.timm_library import NORMS
from corp_deploy.proof.candidates import candidate_from_path, outputs_at
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint
from corp_deploy.store.onnx_file import export_checkpoint
from export.graph.pixels import takes_pixels
from export.graph.to_onnx import onnx_from_model
from ground.files import write_json
from ground.ports import Port
from perf.parity.measures import measures
from perf.timing.watch import cpu_name

KIND = "benchmarks/pixels"
EXAMPLE = Path(__file__).parents[2] / "examples/digits/model"
PRECISIONS = ("fp32", "fp16", "bf16")
BATCH = 8


def _checkpoint() -> Checkpoint:
    model = dense_from_architecture(ARCHITECTURE)
    model.load_state_dict(load_file(assembled() / "dinov2_s.safetensors"))
    return Checkpoint(model=model, architecture=ARCHITECTURE, lineage={})


def _crops(checkpoint: Checkpoint, count: int) -> NDArray[np.uint8]:
    """Pixels of the held-out crops, rounded where the crops were resized after they were decoded."""
    crops = np.load(assembled() / "held.npy", mmap_mode="r")[:count]
    return image_spec(checkpoint.model).normalisation.pixels(np.asarray(crops))


def _write_folded(checkpoint: Checkpoint, path: Path, precision: str) -> None:
    """Folded in whatever type."""
    model, spec = checkpoint.model, image_spec(checkpoint.model)
    made, _ = takes_pixels(traced_model.exportable(model), spec.shape, spec.normalisation)
    port = Port(name=input_ports(model)[0].name, shape=spec.shape, dtype="uint8")
    proto = onnx_from_model(made, (port,), output_ports(model), precision=precision, metadata={}, norms=NORMS)
    onnx.save(proto, str(path))


def _row(
    checkpoint: Checkpoint, pixels: NDArray[np.uint8], exact: NDArray[Any], precision: str, way: str
) -> dict[str, Any]:
    (port,) = output_ports(checkpoint.model)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.onnx"
        if way == "folded":
            _write_folded(checkpoint, path, precision)
        else:
            export_checkpoint(
                checkpoint, path, precision=precision, graph_input="float32" if way == "float32" else "uint8"
            )
        images = image_spec(checkpoint.model).normalisation.images(pixels)
        with candidate_from_path(path).opened([port]) as run:
            answers = outputs_at(run, {"images": images if way == "float32" else pixels}, BATCH)[port.name]
    error = measures(exact, answers, role=port.role).relative_error
    return {"precision": precision, "input": way, "relative_error": error}


def _digits(count: int) -> tuple[Checkpoint, NDArray[np.uint8]]:
    """The committed example with held-out digits as pixels."""
    checkpoint = load_checkpoint(EXAMPLE)
    return checkpoint, image_spec(checkpoint.model).normalisation.pixels(load("held-out").images[:count])


def _convnext(count: int) -> tuple[Checkpoint, NDArray[np.uint8]]:
    torch.manual_seed(0)
    architecture = Architecture(name="convnext_atto", kwargs={})
    model = dense_from_architecture(architecture)
    shape = (count, *image_spec(model).shape)
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return Checkpoint(model=model, architecture=architecture, lineage={}), pixels


def _rows(name: str, checkpoint: Checkpoint, pixels: NDArray[np.uint8]) -> list[dict[str, Any]]:
    normalised = torch.from_numpy(image_spec(checkpoint.model).normalisation.images(pixels))
    with torch.inference_mode():
        exact = torch.cat([checkpoint.model(part) for part in normalised.split(BATCH)]).numpy()
    return [
        {"model": name, **_row(checkpoint, pixels, exact, precision, way)}
        for precision in PRECISIONS
        for way in ("float32", "uint8", *(("folded",) if precision != "fp32" else ()))
    ]


@click.command()
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.option("--images", type=int, default=16)
def main(output: Path, images: int) -> None:
    """Write the record."""
    real = _checkpoint()
    rows = _rows("DINOv2-S, photographs", real, _crops(real, images))
    rows += _rows("digits ViT, digits", *_digits(images))
    rows += _rows("ConvNeXt-atto, random", *_convnext(images))
    versions = {name: importlib.metadata.version(name) for name in ("torch", "onnx", "onnxruntime")}
    setting = {"images": images, "cpu": cpu_name(), **versions}
    write_json(output, {"kind": KIND, "version": 1, "setting": setting, "rows": rows})
    for row in rows:
        click.echo(f"{row['model']}, {row['precision']} {row['input']}: {row['relative_error']:.2e}")


if __name__ == "__main__":
    main()
