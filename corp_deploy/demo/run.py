"""The command `demo`: the whole pipeline on a model trained on digits, from calibration to the report."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from calib.store import load_moments
from corp_deploy.families.counting import macs, parameters
from corp_deploy.invocation.export_choice import ExportOptions
from corp_deploy.invocation.option import Invocation, Pairs
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.proof.report_input import EFFECTS_KIND
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.release import steps
from corp_deploy.release.incremental import StageDirs
from corp_deploy.store.checkpoint import CONFIG, WEIGHTS, Checkpoint, load_checkpoint, save
from corp_deploy.store.dense_model import model_of_directory
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.store.labels import labels_for
from corp_deploy.store.manifest import write_manifest
from ground.errors import Missing
from ground.files import replacing, write_json
from perf.parity.logits import measure_logits
from perf.parity.parity import Parity
from perf.record.runs import Bench
from perf.stats.summary import summarise

SPARSITY = 0.5
CONV_SPARSITY = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A model trained on the digits, and the options by which the demo reduces and proves it."""

    folder: str
    title: str
    narrower: str
    """The reduction in words, the title of its step."""
    reduce: Mapping[str, Any]
    """The options of `reduce`."""
    method: Mapping[str, Any]
    """The same widths as fields of a Method, for the presets `beside`, which are compared with the reduction."""
    beside: tuple[str, ...]
    max_error: float
    """The largest relative error of the outputs in the proof."""
    demo_options: Mapping[str, str] = field(default_factory=dict)
    """The options of `demo` that choose the example."""


VIT = Example(
    folder="model",
    title="The digits example: dense against reduced",
    narrower="reducing to half the channels and head dimensions",
    reduce={"mlp": SPARSITY, "attn": SPARSITY, "align": Pairs(mlp=64, head=16)},
    method={"mlp_sparsity": SPARSITY, "attention_sparsity": SPARSITY},
    beside=("none",),
    max_error=0.05,
)
RESNET = Example(
    folder="resnet",
    title="The digits ResNet: dense against reduced",
    narrower="removing two fifths of the channels between convolutions",
    reduce={"conv": CONV_SPARSITY, "align": Pairs(conv=8)},
    method={"conv_sparsity": CONV_SPARSITY, "align_conv": 8},
    beside=("none", "grail"),
    max_error=0.1,
    demo_options={"example": "resnet"},
)
EXAMPLES: Mapping[str, Example] = MappingProxyType({"vit": VIT, "resnet": RESNET})

ONLY_DEMO = ("images/calibration.npz", "images/held-out.npz", "effects.json")
MODEL = (f"dense/{CONFIG}", f"dense/{WEIGHTS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoScale:
    """The size of the demo: calibration images (`samples` None: all) and those held out, timing, types beside fp32."""

    samples: int | None = None
    hold_out: int = 200
    batches: tuple[int, ...] = (1, 8, 32)
    time_limit: float = 8.0
    types: tuple[str, ...] = ("fp16",)


SCALE = DemoScale()


def demo_invocation(example: Example) -> Invocation:
    return Invocation(command="demo", options={**example.demo_options, "output": "."})


def invocations(example: Example, scale: DemoScale) -> dict[tuple[str, ...], Invocation]:
    """Return the commands that the demo carries out, in order, by the names of the files that each writes."""
    held_out = "images/held-out.npz"
    calibrate = {
        "model": "dense",
        "images": "images/calibration.npz",
        "samples": scale.samples,
        "batch_size": 64,
        "hold_out": scale.hold_out,
        "output": "moments.safetensors",
    }
    reduce = {
        "model": "dense",
        "moments": "moments.safetensors",
        "held_out": "moments.held-out.safetensors",
        **example.reduce,
        "output": "reduced",
    }
    verify = {
        "images": held_out,
        "labels": held_out,
        "moments": "moments.safetensors",
        "min_agreement": 0.98,
        "max_error": example.max_error,
        "output": "parity.json",
    }
    timing = {
        "batch": scale.batches,
        "images": held_out,
        "time_limit": scale.time_limit,
        "energy_time": 0.0,
        "output": "bench.json",
    }
    report = {"title": example.title, "output": "report.html"}
    names = ("model.onnx", *(f"model.{each}.onnx" for each in scale.types))
    dense, reduced = (tuple(f"{model}/{name}" for name in names) for model in ("dense", "reduced"))
    calls: dict[tuple[str, ...], Invocation] = {
        ("moments.safetensors", "moments.held-out.safetensors"): Invocation(command="calibrate", options=calibrate),
        ("reduced/config.json", "reduced/model.safetensors"): Invocation(command="reduce", options=reduce),
    }
    for files in (dense, reduced):
        export = {"model": files[0].partition("/")[0], "precision": ("fp32", *scale.types), "output": files[0]}
        calls[files] = Invocation(command="export", options=export)
    chain, pair = ("dense", "reduced", *reduced), (dense[0], reduced[0])
    return calls | {
        ("parity.json", "parity.npz"): Invocation(command="verify", arguments=chain, options=verify),
        ("bench.json",): Invocation(command="bench", arguments=pair, options=timing),
        ("report.html",): Invocation(command="report", arguments=(".",), options=report),
    }


def made_by(example: Example, scale: DemoScale) -> dict[str, str]:
    """Return the command that writes each file, by name: one of `invocations`, or `demo` for all other files."""
    by_calls = {name: str(run) for names, run in invocations(example, scale).items() for name in names}
    return dict.fromkeys((*ONLY_DEMO, *MODEL), str(demo_invocation(example))) | by_calls


EXAMPLE = Path(__file__).with_name("digits")
STEPS = ("images", "calibrate", "reduce", "export", "verify", "bench", "report")


def write_images(directory: Path) -> None:
    from .digits.images import load_part

    train, held_out = load_part("train"), load_part("held-out")
    with replacing(directory / "calibration.npz") as temporary:
        np.savez_compressed(temporary, images=train.images)
    with replacing(directory / "held-out.npz") as temporary:
        np.savez_compressed(temporary, images=held_out.images, labels=held_out.labels)


def write_inputs(directory: Path, example: Example = VIT) -> Checkpoint:
    """Write the example's model to dense/ and its images to images/; raise Missing without example or scikit-learn."""
    if not (EXAMPLE / example.folder).is_dir():
        raise Missing(f"{EXAMPLE}: the digits example is missing from this installation; install corp-deploy again")
    try:
        import sklearn  # noqa: F401
    except ImportError:
        raise Missing(
            "the demo's images come with scikit-learn, which is absent; pip install 'corp-deploy[demo]'"
        ) from None
    write_images(directory / "images")
    dense = model_of_directory(EXAMPLE / example.folder)
    save(dense, directory / "dense")
    return dense


def _effects(directory: Path, example: Example, dense: Checkpoint, reduced: nn.Module) -> list[dict[str, Any]]:
    """Return a row of error, agreement and accuracy for `reduced` and each preset `beside`, on held-out images."""
    path = directory / "images" / "held-out.npz"
    held_out = images_for_model(dense.model, path)
    labels, pixels = labels_for(path, held_out, dense.model), torch.cat(list(held_out.batches(64)))
    moments = load_moments(directory / "moments.safetensors")
    methods = {preset: method_from_preset(preset, **example.method) for preset in example.beside}
    models = {preset: reduce(dense.model, moments, method).model for preset, method in methods.items()}
    with torch.inference_mode():
        exact = dense.model(pixels).numpy()
        answers = {preset: model(pixels).numpy() for preset, model in (*models.items(), ("best", reduced))}
    measures = {preset: measure_logits(exact, logits) for preset, logits in answers.items()}
    return [
        {
            "preset": preset,
            "relative_error": measures[preset].relative_error,
            "agreement": measures[preset].top1_agreement,
            "accuracy": float((logits.argmax(1) == labels).mean()),
        }
        for preset, logits in answers.items()
    ]


def _record(dense: Checkpoint, reduced: Checkpoint, parity: Parity, bench: Bench) -> dict[str, Any]:
    links = {link.kind: link for link in parity.links}
    models = {"dense": (dense, 1.0), "reduced": (reduced, links["reduced"].measures.agreement)}
    rows = {
        name: {
            "parameters": parameters(checkpoint.model),
            "macs": macs(checkpoint.model),
            "accuracy": right.accuracy,
            "agreement": agreement,
        }
        for (name, (checkpoint, agreement)), right in zip(models.items(), parity.accuracy[:2], strict=True)
    }
    speed = [
        {
            "batch": row.batch,
            **{
                name: {
                    "p50_ms": None if side.p50_ms is None else side.p50_ms.value,
                    "images_per_s": None if side.throughput is None else side.throughput.value,
                    "status": side.status,
                }
                for name, side in row.sides.items()
            },
            "speedup": None if row.speedup is None else row.speedup.value,
        }
        for row in summarise(bench).rows
    ]
    told = {"verdict": parity.verdict, "line": parity.line}
    return told | {"models": rows, "speed": speed}


def run_demo(
    directory: Path,
    example: Example = VIT,
    *,
    note: Callable[[str], None],
    step: Callable[[int], None],
    scale: DemoScale | None = None,
) -> dict[str, Any]:
    """Run every step, write its results to `directory`, and return the figures that the command shows.

    `note` is called with the next step in words, `step` with the number of finished steps.

    Raises Missing if the example or scikit-learn is absent.
    """
    scale = scale or SCALE
    place = StageDirs(root=directory, into=directory, unfinished=directory / ".unfinished.safetensors")
    of_command: dict[str, list[Invocation]] = {}
    for run in invocations(example, scale).values():
        of_command.setdefault(run.command, []).append(run)

    done = count(1)

    @contextmanager
    def stage(words: str) -> Iterator[None]:
        note(words)
        yield
        step(next(done))

    with stage("writing the example's images and model"):
        dense = write_inputs(directory, example)
    with stage("calibrating on unlabelled images"):
        steps.write_calibration(place, *of_command["calibrate"])
    with stage(example.narrower):
        (narrowing,) = of_command["reduce"]
        steps.write_reduced(place, narrowing, ReduceOptions.from_options(example.reduce))
        reduced = load_checkpoint(directory / "reduced")
    with stage("exporting typed ONNX graphs"):
        for run in of_command["export"]:
            steps.write_graphs(place, run, ExportOptions.from_options(run.options))
    with stage("proving parity on held-out images"):
        parity = steps.write_parity(place, *of_command["verify"])
        effects = _effects(directory, example, dense, reduced.model)
        write_json(directory / "effects.json", {"kind": EFFECTS_KIND, "version": 1, "rows": effects})
    with stage("timing dense against reduced"):
        bench = steps.write_bench(place, *of_command["bench"])
    with stage("writing the report"):
        # The first manifest goes into the report, the second lists the report, too.
        write_manifest(directory, made_by(example, scale), command=str(demo_invocation(example)))
        steps.write_page(place, *of_command["report"])
        write_manifest(directory, made_by(example, scale), command=str(demo_invocation(example)))
    return _record(dense, reduced, parity, bench) | {"effects": effects}
