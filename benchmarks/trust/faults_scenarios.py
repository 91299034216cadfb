"""Commands to disturb: each with what stands where it writes beforehand."""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import onnx

from benchmarks.trust.faults_rows import Scenario

RECIPE = """
[model]
model = "dense"
[calibration]
images = "calibration.npy"
hold_out = 4
batch_size = 4
[held_out]
images = "held-out.npz"
labels = "held-out.npz"
[reduce]
mlp = 0.3
attn = 0.5
align_mlp = 8
align_head = 8
[export]
precisions = ["fp32"]
[parity]
batches = [1, 3]
max_error = 9.0
[bench]
batches = [2]
time_limit_s = 2
half_width = 0.9
block_ms = 1
min_rounds = 6
threads = 1
[samples]
count = 3
[gate]
fail_if = ["params >= dense"]
[package]
name = "tiny"
"""
TIMED_RESULTS = (
    "bench.json",
    "parity.json",
    "parity.npz",
    "sweep/*",
    "optimised.onnx.json",
    "tables/*",
    "decoders.json",
)
TIMED = ("bench.json", "gate.json", "report.html", "report.md", "report.xml", "MODEL_CARD.md", "manifest.json",
         "SHA256SUMS")  # fmt: skip


def run(*words: object) -> None:
    """A command in this process, which so imports what those to come need."""
    from click.testing import CliRunner

    from corp_deploy.cli import main

    done = CliRunner().invoke(main, [str(word) for word in words])
    if done.exit_code:
        raise click.ClickException(f"{words}: exit {done.exit_code}: {done.output}")


def prepare(home: Path) -> None:
    """A tiny model, its images, its moments."""
    import numpy as np
    import torch

    from corp_deploy.store.checkpoint import save
    from tests import tiny

    torch.set_num_threads(1)
    _remember_traces()
    (home / "empty").mkdir(parents=True)
    save(tiny.checkpoint(), home / "dense")
    np.save(home / "calibration.npy", tiny.images(12))
    np.savez(home / "held-out.npz", images=tiny.images(9, seed=1), labels=np.arange(9) % 7)
    (home / "recipe.toml").write_text(RECIPE)
    run(*calibrate(home), "-o", home / "moments.safetensors")


def _remember_traces() -> None:
    """A model is traced once: that takes the longest and opens no file, and forked processes know what was traced."""
    from export.graph import to_onnx

    trace, traced = to_onnx._trace, dict[str, bytes]()

    def remembered(model: Any, samples: Any, outputs: int, **options: Any) -> Any:
        weights = sorted((name, tensor.numpy().tobytes()) for name, tensor in model.state_dict().items())
        shapes = {name: tuple(sample.shape) for name, sample in samples.items()}
        key = hashlib.sha256(repr((str(model), weights, shapes, outputs, options)).encode()).hexdigest()
        if key not in traced:
            traced[key] = trace(model, samples, outputs, **options).SerializeToString()
        return onnx.ModelProto.FromString(traced[key])

    to_onnx._trace = remembered


def _older_model(home: Path) -> Path:
    if not (home / "older model").is_dir():
        run(*reduce(home), "--mlp", 0.25, "-o", home / "older model" / "out")
    return home / "older model"


def package(home: Path) -> tuple[object, ...]:
    """The graph of the older model as a repository; where to is left to say."""
    graphs = home / "graphs"
    if not graphs.is_dir():
        run("export", "--model", _older_model(home) / "out", "-o", graphs / "reduced" / "model.onnx", "--quiet")
    return "package", graphs, "--name", "tiny", "--quiet", "-o"


def _older_repository(home: Path) -> Path:
    if not (home / "older repository").is_dir():
        run(*package(home), home / "older repository" / "repository")
    return home / "older repository"


def released(home: Path) -> Path:
    """A whole release."""
    if not (home / "released").is_dir():
        run("release", home / "recipe.toml", "-o", home / "released", "--quiet")
    return home / "released"


def calibrate(home: Path) -> tuple[object, ...]:
    return "calibrate", "--model", home / "dense", "--images", home / "calibration.npy", "--batch-size", 4, "--quiet"


def reduce(home: Path) -> tuple[object, ...]:
    words = ("reduce", "--model", home / "dense", "--moments", home / "moments.safetensors", "--align", "mlp=8,head=8")
    return *words, "--attn", 0.5, "--quiet"


def scenarios_of_calibrate(home: Path) -> Iterator[Scenario]:
    place, name = home / "place", "moments.safetensors"
    run(*calibrate(home), "--samples", 8, "-o", home / "older moments" / name)
    words = (*calibrate(home), "--hold-out", 4, "--checkpoint-every", 4, "-o", place / name)
    for start, before in (("nothing", "empty"), ("an older one", "older moments")):
        yield Scenario(command="calibrate", start=start, words=words, place=place, before=home / before, apart=True)


def scenarios_of_reduce(home: Path) -> Iterator[Scenario]:
    place = home / "place"
    words = (*reduce(home), "--mlp", 0.5, "-o", place / "out")
    for start, before in (("nothing", home / "empty"), ("an older one", _older_model(home))):
        yield Scenario(command="reduce", start=start, words=words, place=place, before=before)


def scenarios_of_package(home: Path) -> Iterator[Scenario]:
    """The first version of a repository, and the second."""
    place = home / "place"
    versions = (("nothing", home / "empty", 1), ("an older version", _older_repository(home), 2))
    for start, before, number in versions:
        words = (*package(home), place / "repository", "--model-version", number)
        yield Scenario(command="package", start=start, words=words, place=place, before=before, is_there=2)


def scenarios_of_release(home: Path) -> Iterator[Scenario]:
    """Stage by stage, each from where those before it stand."""
    released(home)  # which imports what the stages need
    from corp_deploy.release.baseline import Baseline
    from corp_deploy.release.pipeline import stages_of
    from corp_deploy.release.recipe_file import load_recipe

    place = home / "place"
    whole = ("release", home / "recipe.toml", "-o", place / "out", "--quiet")
    shutil.rmtree(place, ignore_errors=True)
    (place / "out").mkdir(parents=True)
    for stage in stages_of(load_recipe(home / "recipe.toml"), place / "out", Baseline()):
        before = home / "stages" / stage.name
        shutil.copytree(place, before)
        words = (*whole, "--only", stage.name)
        yield Scenario(
            command=f"release: {stage.name}", start="the stages before it", words=words, place=place, before=before,
            differs=[f"out/{name}" for name in TIMED],
        )  # fmt: skip
        shutil.rmtree(place)
        shutil.copytree(before, place)
        run(*words)


def _results_of(home: Path) -> dict[str, tuple[object, ...]]:
    """Commands that write one file or directory into `place`, and what; the release stands."""
    place, release = home / "place", released(home)
    subjects = (release / "dense" / "model.onnx", release / "reduced" / "model.onnx")
    images = ("--images", release / "samples" / "images.npy")
    model, moments = ("--model", home / "dense"), ("--moments", home / "moments.safetensors")
    halves = (home / "half 1.safetensors", home / "half 2.safetensors")
    decoder, graph = home / "decoder", home / "decoder onnx"
    quick = ("--batch", 2, "--time-limit", 2, "--half-width", 0.9, "--block-ms", 1, "--min-rounds", 6, "--threads", 1)
    return {
        "export": ("--model", release / "reduced", "-o", place / "model.onnx"),
        "verify": (release / "dense", release / "reduced", subjects[1], *images, "--min-agreement", 0, "-o",
                   place / "parity.json"),
        "bench": (*subjects, *quick, "-o", place / "bench.json"),
        "export-decoder": (decoder, "-o", place / "graph"),
        "verify: a decoder": (decoder, graph, "--random", 2, "--length", 8, "-o", place / "decoder-parity.json"),
        "bench: decoders": (graph, graph, "--length", 8, "--cached", 8, *quick, "-o", place / "decoders.json"),
        "perplexity": (f"hf:{decoder}", "--text", home / "text.txt", "-o", place / "perplexity.json"),
        "report": (release, "-o", place / "report.html"),
        "calibrate --merge": (*halves, "-o", place / "both.safetensors"),
        "inspect redundancy": (*moments, "-o", place / "redundancy.svg"),
        "sweep": (*model, *moments, *images, "--sparsity", "0.25,0.5", "--align", "mlp=8,head=8", "-o",
                  place / "sweep"),
        "build": (subjects[1], "--backend", "onnxruntime", "-o", place / "optimised.onnx"),
    }  # fmt: skip


def _others_of(home: Path) -> dict[str, tuple[object, ...]]:
    """Commands that write nothing, or what holds times."""
    release = released(home)
    bench = release / "bench.json"
    graphs = (release / "dense" / "model.onnx", release / "reduced" / "model.onnx")
    return {
        "audit": graphs,
        "latency-table": ("--model", home / "dense", "--batch", 1, "--align", "mlp=8,head=8", "--threads", 1, "-o",
                          home / "place" / "tables"),
        "check": (release,),
        "bench compare": (bench, bench),
        "gate": (bench, "--fail-if", "params >= dense"),
        "inspect": ("--model", home / "dense"),
        "package lint": (_older_repository(home) / "repository",),
        "doctor": (),
        "doctor completion": ("bash",),
    }  # fmt: skip


def scenarios_of_others(home: Path) -> Iterator[Scenario]:
    """Every other command."""
    _halves(home)
    _decoder(home)
    yield _serve_version(home)
    for command, options in (_results_of(home) | _others_of(home)).items():
        quiet = () if command == "doctor completion" else ("--quiet",)
        words = (*command.partition(":")[0].split(), *options, *quiet)
        if command != "audit":  # TensorRT is not for forks
            run(*words)
        yield Scenario(
            command=command, start="nothing", words=words, place=home / "place",
            before=home / "empty", apart=True, differs=TIMED_RESULTS,
        )  # fmt: skip


def _halves(home: Path) -> None:
    """Moments of other images, to be added."""
    import numpy as np

    from tests import tiny

    for number in (1, 2):
        np.save(home / f"half {number}.npy", tiny.images(6, seed=10 + number))
        words = ("--images", home / f"half {number}.npy", "-o", home / f"half {number}.safetensors", "--quiet")
        run("calibrate", "--model", home / "dense", *words)


def _decoder(home: Path) -> None:
    """A decoder, its graph, and text."""
    from tests import decoders

    decoders.write_decoder(home / "decoder", "llama")
    (home / "text.txt").write_text(decoders.text(0, 2_000))
    run("export-decoder", home / "decoder", "-o", home / "decoder onnx", "--quiet")


def _serve_version(home: Path) -> Scenario:
    """Back to the first of two."""
    *_, second = scenarios_of_package(home)
    second.reset()
    run(*second.words)
    shutil.copytree(second.place, home / "two versions")
    words = ("package", "serve", second.place / "repository", "--name", "tiny", "--model-version", 1, "--quiet")
    return Scenario(
        command="package serve", start="version 2 served", words=words, place=second.place, before=home / "two versions"
    )
