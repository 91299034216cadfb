"""The whole pipeline on the digits example: trained weights and real images in, a smaller model with its proof and
report out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import nn

from calib.images import parted
from calib.store import save as save_moments
from perf.measures import measures
from perf.parity import Parity
from perf.report import html
from perf.runs import Bench, save_bench
from perf.summary import summarise
from perf.timing import Plan

from .calibration import calibrate
from .candidates import candidate_from_path
from .chain import Limits, given_from_images, prove
from .checkpoint import Checkpoint, load_checkpoint
from .choices import Choices, choices_from_preset
from .errors import Missing
from .files import replacing, write_json, write_text
from .graphs import export_checkpoint
from .inputs import images_for_model, labels_from_path
from .manifest import write_manifest
from .model_cost import macs, parameters
from .planning import Asked
from .proofs import save_proof
from .records import EFFECTS_KIND, record_of_directory
from .reduce import reduce
from .reducing import reduce_checkpoint
from .side_by_side import measure

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "digits"
SPARSITY = 0.5
BATCHES = (1, 8, 32)
STEPS = ("images", "calibrate", "reduce", "export", "verify", "bench", "report")
PLAN = Plan(time_limit_s=8.0)
LIMITS = Limits(min_agreement=0.98, max_error=0.05)

# Relative to the demo's directory, and to the repository for the example's own model.
MODEL = "examples/digits/model"
HOLD_OUT = 200  # calibration images on which the sites are only judged
CALIBRATION = f"--images images/calibration.npz --hold-out {HOLD_OUT}"
MOMENTS = "--moments moments.safetensors --held-out moments.held-out.safetensors"
REDUCED = "reduced reduced/model.onnx reduced/model.fp16.onnx"
LIMITS_GIVEN = "--moments moments.safetensors --min-agreement 0.98 --max-error 0.05"
HELD_OUT = "--images images/held-out.npz --labels images/held-out.npz"
COMMANDS = {
    "moments.safetensors": f"calibrate --model {MODEL} {CALIBRATION} -o moments.safetensors",
    "reduced/config.json": f"reduce --model {MODEL} {MOMENTS} --mlp 0.5 --attn 0.5 -o reduced",
    "dense/model.onnx": f"export --model {MODEL} --precision fp32,fp16 -o dense/model.onnx",
    "reduced/model.onnx": "export --model reduced --precision fp32,fp16 -o reduced/model.onnx",
    "parity.json": f"verify {MODEL} {REDUCED} {HELD_OUT} {LIMITS_GIVEN} -o parity.json",
    "bench.json": "bench dense/model.onnx reduced/model.onnx --batch 1,8,32 -o bench.json",
    "report.html": "report . -o report.html",
}
SAME_COMMAND = {
    "moments.held-out.safetensors": "moments.safetensors",
    "reduced/model.safetensors": "reduced/config.json",
    "dense/model.fp16.onnx": "dense/model.onnx",
    "reduced/model.fp16.onnx": "reduced/model.onnx",
    "parity.npz": "parity.json",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """What the demo found, for its table."""

    dense: Checkpoint
    reduced: Checkpoint
    parity: Parity
    bench: Bench
    effects: list[dict[str, Any]]


def _require_example() -> None:
    if not (EXAMPLE / "model").is_dir():
        raise Missing(f"{EXAMPLE}: the digits example is not here; run the demo from a clone of the repository")
    try:
        import sklearn  # noqa: F401
    except ImportError:
        raise Missing("the demo's images come with scikit-learn, which is absent; pip install scikit-learn") from None


def _write_images(directory: Path) -> None:
    """The calibration images without labels, the held-out ones with."""
    from examples.digits.images import load

    train, held_out = load("train"), load("held-out")
    with replacing(directory / "calibration.npz") as temporary:
        np.savez_compressed(temporary, images=train.images)
    with replacing(directory / "held-out.npz") as temporary:
        np.savez_compressed(temporary, images=held_out.images, labels=held_out.labels)


def _effect(
    preset: str, model: nn.Module, dense: NDArray[np.float32], pixels: torch.Tensor, labels: NDArray[np.int64]
) -> dict[str, Any]:
    with torch.inference_mode():
        logits = model(pixels).numpy()
    errors = measures(dense, logits)
    return {
        "preset": preset,
        "relative_error": errors.relative_error,
        "agreement": errors.top1_agreement,
        "accuracy": float((logits.argmax(1) == labels).mean()),
    }


def _effects(
    dense: Checkpoint, reduced: nn.Module, without: nn.Module, pixels: torch.Tensor, labels: NDArray[np.int64]
) -> list[dict[str, Any]]:
    """The same widths without repair and with it, on the held-out images."""
    with torch.inference_mode():
        reference = dense.model(pixels).numpy()
    pairs = (("none", without), ("best", reduced))
    return [_effect(preset, model, reference, pixels, labels) for preset, model in pairs]


def _choices(preset: str) -> Choices:
    return choices_from_preset(preset, mlp_sparsity=SPARSITY, attention_sparsity=SPARSITY)


def _made_by() -> dict[str, str]:
    commands = COMMANDS | {name: COMMANDS[other] for name, other in SAME_COMMAND.items()}
    return {name: f"corp-deploy {command}" for name, command in commands.items()}


def run_demo(directory: Path, *, said: Callable[[str], None], step: Callable[[int], None]) -> Demo:
    """Run every step into `directory`. `said` hears what is done next, `step` how many steps are finished.

    Raises Missing when the example or what it needs is absent.
    """
    _require_example()
    command = "corp-deploy demo"
    said("writing the example's images")
    _write_images(directory / "images")
    dense = load_checkpoint(EXAMPLE / "model")
    step(1)

    said("calibrating on unlabelled images")
    source = images_for_model(dense.model, directory / "images" / "calibration.npz")
    moments, held_out_moments = (calibrate(dense, part, batch_size=64) for part in parted(source, HOLD_OUT, seed=0))
    for name, taken in (("moments", moments), ("moments.held-out", held_out_moments)):
        with replacing(directory / f"{name}.safetensors") as temporary:
            save_moments(taken, temporary)
    step(2)

    said("reducing to half the channels and head dimensions")
    best = Asked(preset="best", choices=_choices("best"))
    reduce_checkpoint(
        dense,
        directory / "moments.safetensors",
        best,
        directory=directory / "reduced",
        held_out=held_out_moments,
    )
    reduced = load_checkpoint(directory / "reduced")
    without = reduce(dense.model, moments, _choices("none")).model
    step(3)

    said("exporting typed ONNX graphs")
    for name, checkpoint in (("dense", dense), ("reduced", reduced)):
        export_checkpoint(checkpoint, directory / name / "model.onnx", precision="fp32")
        export_checkpoint(checkpoint, directory / name / "model.fp16.onnx", precision="fp16")
    step(4)

    said("proving parity on held-out images")
    held_out = images_for_model(dense.model, directory / "images" / "held-out.npz")
    labels = labels_from_path(directory / "images" / "held-out.npz", held_out)
    chain = [directory / "reduced", directory / "reduced" / "model.onnx", directory / "reduced" / "model.fp16.onnx"]
    steps = [candidate_from_path(path) for path in chain]
    given = given_from_images(held_out, labels)
    proof = prove(dense, steps, given, batches=(1, 7, 32), limits=LIMITS, moments=moments)
    save_proof(proof, directory / "parity.json")
    pixels = torch.cat(list(held_out.batches(64)))
    effects = _effects(dense, reduced.model, without, pixels, labels)
    write_json(directory / "effects.json", {"kind": EFFECTS_KIND, "version": 1, "rows": effects})
    step(5)

    said("timing dense against reduced")
    graphs = directory / "dense" / "model.onnx", directory / "reduced" / "model.onnx"
    bench = measure(
        *graphs,
        batches=BATCHES,
        plan=PLAN,
        images=pixels[: max(BATCHES)].numpy(),
        command=_made_by()["bench.json"].split(),
    )
    with replacing(directory / "bench.json") as temporary:
        save_bench(bench, temporary)
    step(6)

    said("writing the report")
    write_manifest(directory, _made_by(), command=command)
    write_text(directory / "report.html", html(record_of_directory(directory)))
    write_manifest(directory, _made_by(), command=command)
    step(7)
    return Demo(dense=dense, reduced=reduced, parity=proof.parity, bench=bench, effects=effects)


def _cost(checkpoint: Checkpoint) -> tuple[int, int]:
    return parameters(checkpoint.model), macs(checkpoint.model)


def demo_record(demo: Demo) -> dict[str, Any]:
    """The table's figures."""
    accuracy = [row.accuracy for row in demo.parity.accuracy]
    links = {link.kind: link for link in demo.parity.links}
    rows = {
        "dense": {
            "parameters": _cost(demo.dense)[0],
            "macs": _cost(demo.dense)[1],
            "accuracy": accuracy[0],
            "agreement": 1.0,
        },
        "reduced": {
            "parameters": _cost(demo.reduced)[0],
            "macs": _cost(demo.reduced)[1],
            "accuracy": accuracy[1],
            "agreement": links["reduced"].measures.top1_agreement,
        },
    }
    speed = [
        {
            "batch": row.batch,
            **{
                name: {
                    "p50_ms": None if side.p50_ms is None else side.p50_ms.value,
                    "images_per_s": None if side.throughput is None else side.throughput.value,
                }
                for name, side in row.sides.items()
            },
            "speedup": None if row.speedup is None else row.speedup.value,
        }
        for row in summarise(demo.bench).rows
    ]
    return {
        "verdict": demo.parity.verdict,
        "line": demo.parity.line,
        "models": rows,
        "speed": speed,
        "effects": demo.effects,
    }


def _compared(table: Table, name: str, dense: float, reduced: float, form: str, *, change: bool = True) -> None:
    difference = f"{reduced / dense - 1:+.1%}" if change else ""
    table.add_row(name, form.format(dense), form.format(reduced), difference)


def demo_tables(record: dict[str, Any]) -> tuple[Table, Table]:
    """Dense beside reduced, and what the repair changed."""
    table = Table("", "dense", "reduced", "change")
    dense, reduced = record["models"]["dense"], record["models"]["reduced"]
    _compared(table, "parameters", dense["parameters"], reduced["parameters"], "{:,}")
    _compared(table, "MACs per image", dense["macs"], reduced["macs"], "{:,}")
    _compared(table, "accuracy, held out", dense["accuracy"], reduced["accuracy"], "{:.1%}", change=False)
    _compared(table, "top-1 agreement", dense["agreement"], reduced["agreement"], "{:.1%}", change=False)
    for row in record["speed"]:
        for key, words, form in (
            ("p50_ms", "p50, batch {} (ms)", "{:.2f}"),
            ("images_per_s", "images/s, batch {}", "{:,.0f}"),
        ):
            if row["dense"][key] is not None and row["reduced"][key] is not None:
                _compared(table, words.format(row["batch"]), row["dense"][key], row["reduced"][key], form)
    repair = Table("same widths", "relative logit error", "agreement", "accuracy")
    for effect in record["effects"]:
        figures = f"{effect['relative_error']:.4f}", f"{effect['agreement']:.1%}", f"{effect['accuracy']:.1%}"
        repair.add_row({"none": "without repair (none)", "best": "repaired (best)"}[effect["preset"]], *figures)
    return table, repair
