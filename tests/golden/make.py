"""Writes the golden files: small models, moments and records in today's formats, made by the tool's own commands.

python -m tests.golden.make            writes tests/golden/files anew

tests/test_golden.py reads them: a format that changes without a new version is noticed there. Run this after a version
is raised. All files are made in an empty directory by relative paths, so that none tells of the machine's folders.
Needs the extras of `make setup`, and TensorRT-RTX.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
from click.testing import CliRunner

from calib.calibrate import ResumeFile
from corp_deploy.cli import main as tool
from corp_deploy.demo import run as demo
from corp_deploy.demo.run import VIT, DemoScale
from corp_deploy.polish.state import StateFile
from corp_deploy.proof.compare_engines import Golden, write_golden
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, save
from corp_deploy.store.dense_model import load_dense
from ground.feeds import Feeds
from ground.files import sha256_of_file
from ground.ports import LOGITS
from perf.parity.labels import Source
from perf.parity.parity import ImageSet
from perf.runners.onnx import OnnxRunner
from tests import decoders, tiny
from tests.golden.answers import FIGURES, MODELS, MOMENTS

HERE = Path(__file__).parent
FILES = HERE / "files"
ARCHITECTURES = {
    "vit": Architecture(
        name="vit_tiny_patch16_224",
        kwargs={"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "mlp_ratio": 1.0,
                "num_classes": 7},
    ),
    "vit-small": Architecture(
        name="vit_tiny_patch16_224",
        kwargs={"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 1, "mlp_ratio": 1.0,
                "num_classes": 7},
    ),
    "resnet": Architecture(
        name="resnet18d",
        kwargs={"img_size": 32, "num_classes": 7, "layers": [1, 1, 1, 1], "channels": [16, 16, 8, 8], "stem_width": 8},
    ),
}  # fmt: skip
"""Of timm's, as small as they go."""
LLAMA: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "tie_word_embeddings": True}  # fmt: skip
ALIGN = ("--align", "mlp=8,head=8,conv=8")
RECIPE = """[release]
name = "golden"
version = "1"
[model]
model = "models/vit-small"
[calibration]
images = "images.npy"
hold_out = 4
batch_size = 4
[held_out]
images = "held-out.npz"
labels = "held-out.npz"
[reduce]
mlp = 0.3
attn = 0.3
align_mlp = 8
align_head = 8
[export]
precisions = ["fp32"]
[parity]
batches = [1]
max_error = 0.9
[bench]
batches = [1]
time_limit_s = 2
half_width = 0.9
block_ms = 1
min_rounds = 6
threads = 1
[samples]
count = 2
[gate]
fail_if = ["params >= dense"]
[package]
name = "golden"
"""
QUICK = ("--batch", "1", "--time-limit", "2", "--half-width", "0.9")


def called(*words: object, codes: Sequence[int] = (0,)) -> str:
    """What a command printed. An exit code that is not expected ends all."""
    typed = [str(word) for word in words]
    with patch.object(sys, "argv", ["corp-deploy", *typed]):
        result = CliRunner().invoke(tool, typed)
    assert result.exit_code in codes, (words, result.output, result.stderr)
    return result.stdout


def put(source: Path | str, target: Path) -> None:
    """Keep a file or a directory under this name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    (shutil.copytree if Path(source).is_dir() else shutil.copyfile)(source, target)


def _sources() -> None:
    """Dense models as model directories, images, texts: what everything else is made of."""
    for name, architecture in ARCHITECTURES.items():
        model = dense_from_architecture(architecture)
        tiny.enliven(model, seed=0)
        save(Checkpoint(model=model, architecture=architecture, lineage={}), Path("models", name))
    decoders.write_decoder(Path("llama-hf"), "llama", **LLAMA)
    save(load_dense("hf:llama-hf", weights=None, kwargs={}), Path("models/llama"))
    np.save("images.npy", tiny.images(24, size=16))
    np.savez("held-out.npz", images=tiny.images(9, seed=1, size=16), labels=np.arange(9) % 7)
    np.save("larger.npy", tiny.images(24, size=32))
    Path("text.txt").write_text(decoders.text(letters=3000), encoding="utf-8")


def _moments() -> None:
    """One file for every way in which moments are kept."""
    own = ("--model", "models/vit", "--images", "images.npy", "--batch-size", "8")
    called("calibrate", *own, "--hold-out", "6", "-o", "moments/vit.safetensors")
    small = ("--model", "models/vit-small", "--images", "images.npy", "--batch-size", "8")
    called("calibrate", *small, "--groups", "image", "-o", "moments/vit-small-grouped.safetensors")
    called("calibrate", *small, "--attention-system", "-o", "moments/vit-small-system.safetensors")
    called("calibrate", *own, "--merge-tokens", "3", "-o", "moments/vit-merged.safetensors")
    called("calibrate", *own, "--snapshots", "8,16", "-o", "moments/vit-snapshots.safetensors")
    called("calibrate", "--model", "models/resnet", "--images", "larger.npy", "--residual", "--sites", "layer4.*",
           "-o", "moments/resnet-residual.safetensors")  # fmt: skip
    called("calibrate", "--model", "hf:llama-hf", "--text", "text.txt", "--samples", "12", "--sequential",
           "-o", "moments/llama.safetensors")  # fmt: skip


def _models() -> None:
    """Reduced models of several families, and of every kind of entry that a config.json has."""
    vit = ("--model", "models/vit", *ALIGN, "--mlp", "0.5")
    plain = ("--moments", "moments/vit.safetensors")
    called("reduce", *vit, *plain, "--attn", "0.4", "--heads", "padded", "-o", "models/vit-padded")
    called("reduce", *vit, *plain, "--sparse", "2:4", "--images", "images.npy", "-o", "models/vit-sparse")
    called("reduce", *vit, "--moments", "moments/vit-merged.safetensors", "--merge-tokens", "3", "-o",
           "models/vit-merged")  # fmt: skip
    named = ("--outputs", "class,patches,block0")
    called("calibrate", "--model", "models/vit", *named, "--images", "images.npy", "-o", "named.safetensors")
    called("reduce", *vit, *named, "--moments", "named.safetensors", "-o", "models/vit-named")
    called("reduce", "--model", "models/llama", "--moments", "moments/llama.safetensors", "--mlp", "0.5",
           "--attn", "0.5", *ALIGN, "-o", "models/llama-reduced")  # fmt: skip


def _states() -> None:
    """What interrupted runs leave: a copy of each state, before it is cleared away."""

    def leaving_a_copy(save: Callable[..., None], name: str) -> Callable[..., None]:
        def saved(file: Any, *what: Any) -> None:
            save(file, *what)
            shutil.copyfile(file.path, name)

        return saved

    own = ("--model", "models/vit-small", "--images", "images.npy")
    with patch.object(ResumeFile, "save", leaving_a_copy(ResumeFile.save, "calibration-state.safetensors")):
        called("calibrate", *own, "--batch-size", "8", "--checkpoint-every", "16", "-o", "small.safetensors")
    with patch.object(StateFile, "save", leaving_a_copy(StateFile.save, "polish-state.safetensors")):
        called("reduce", *own, "--moments", "small.safetensors", "--mlp", "0.5", *ALIGN, "--polish", "layer",
               "--polish-steps", "1", "-o", "polished")  # fmt: skip


def _proofs() -> None:
    """Records of proof and measurement, as a directory that report reads."""
    for name in ("vit", "vit-padded"):
        called("export", "--model", f"models/{name}", "-o", f"{name}.onnx")
    held_out = ("--images", "held-out.npz", "--labels", "held-out.npz")
    called("verify", "models/vit", "models/vit-padded", "vit-padded.onnx", *held_out, "-o", "records/parity.json",
           codes=(0, 3))  # fmt: skip
    called("bench", "vit.onnx", "vit-padded.onnx", "-o", "records/bench.json", *QUICK, "--block-ms", "1",
           "--min-rounds", "6", "--threads", "1")  # fmt: skip
    called("gate", "records/bench.json", "records/parity.json", "--fail-if", "params >= dense", "--history", "kept",
           "-o", "records/gate.json", codes=(0, 3))  # fmt: skip
    called("inspect", "redundancy", "--moments", "moments/vit.safetensors", "-o", "records/redundancy.json")
    Path("records/doctor.json").write_text(called("doctor", "--json"), encoding="utf-8")
    called("latency-table", "--model", "models/vit-small", "-o", "tables", "--batch", "1", "--threads", "1", *ALIGN)
    snapshots = [f"moments/vit-snapshots{part}.safetensors" for part in (".8", ".16", "")]
    called("sweep", "--model", "models/vit", "--moments", ",".join(snapshots), "--images", "held-out.npz",
           "--sparsity", "0.5", "--preset", "best", *ALIGN, "--bench", "onnxruntime", "--threads", "1", *QUICK,
           "-o", "sweep")  # fmt: skip
    with OnnxRunner(Path("vit.onnx")) as runner:
        feeds: Feeds = {"images": tiny.images(2, seed=1, size=16)}
        digest, library = sha256_of_file(Path("vit.onnx")), str(runner.describe()["version"])
        source = Source(label="vit.onnx", backend="onnxruntime", version=library, targets=(), precision="fp32",
                        graph_sha256=digest, sha256=digest)  # fmt: skip
        images = ImageSet(count=2, digest=sha256_of_file(Path("held-out.npz")))
        golden = Golden(source=source, images=images, batch=2, outputs=(LOGITS,), feeds=feeds, answers=runner(feeds))
    write_golden(golden, Path("golden"))


def _decoders() -> None:
    """Records of decoders' graphs and of their perplexity."""
    called("reduce", "--model", "hf:llama-hf", "--moments", "moments/llama.safetensors", "--mlp", "0.5", *ALIGN,
           "--save-as", "hf", "-o", "llama-saved")  # fmt: skip
    for source, graph in (("llama-hf", "llama-graph"), ("llama-saved/hf", "llama-graph-reduced")):
        called("export-decoder", source, "-o", graph, "--length", "16")
    called("perplexity", "hf:llama-hf", "llama-saved", "--text", "text.txt", "--samples", "4",
           "-o", "records/perplexity.json", codes=(0, 3))  # fmt: skip
    called("verify", "llama-hf", "llama-graph", "--random", "2", "--length", "6", "-o", "records/decoder-parity.json")
    called("bench", "llama-graph", "llama-graph-reduced", "--length", "4", "--cached", "4", *QUICK,
           "--block-ms", "1", "--min-rounds", "6", "--threads", "1", "-o", "records/decoder-bench.json")  # fmt: skip


def _engines() -> None:
    """Built for a GPU that need not be here."""
    called("build", "vit-padded.onnx", "-o", "model.plan", "--backend", "tensorrt-rtx", "--sm", "86", "--batch",
           "1:2:4")  # fmt: skip
    called("audit", "vit.onnx", "vit-padded.onnx", "--backend", "tensorrt-rtx", "--sm", "86",
           "-o", "records/fusion-audit.json", codes=(0, 1))  # fmt: skip


def _release() -> None:
    Path("recipe.toml").write_text(RECIPE, encoding="utf-8")
    called("release", "recipe.toml", "-o", "release")


def _demo() -> None:
    demo.run_demo(Path("demo"), VIT, note=click.echo, step=lambda done: None,
                  scale=DemoScale(samples=64, hold_out=8, batches=(2,), time_limit=60.0))  # fmt: skip


STEPS: tuple[Callable[[], None], ...] = (
    _sources, _moments, _models, _states, _proofs, _decoders, _engines, _release, _demo,
)  # fmt: skip


def _kept(to: Path) -> None:
    """What stays, of all that was made."""
    for name in MODELS:
        put(f"models/{name}", to / "models" / name)
    for name in MOMENTS:
        put(f"moments/{name}.safetensors", to / "moments" / f"{name}.safetensors")
    put("calibration-state.safetensors", to / "states" / "calibration.safetensors")
    put("polish-state.safetensors", to / "states" / "polish.safetensors")
    put("release/.stages/reduce.json", to / "states" / "stamp.json")
    put(min(Path("sweep/trials").glob("*/score.json")), to / "states" / "trial" / "score.json")
    records = to / "records"
    for path in [*Path("records").glob("*.json"), Path("records/parity.npz"), Path("model.plan.json")]:
        put(path, records / path.name)
    for name in ("effects", "manifest"):
        put(f"demo/{name}.json", records / f"{name}.json")
    for name in ("sweep", "calibration-size"):
        put(f"sweep/{name}.json", records / f"{name}.json")
    put("models/vit-padded/effort.json", records / "effort.json")
    put("golden", records / "golden")
    put(min(Path("tables").iterdir(), key=lambda path: path.stat().st_size), records / "block.latency-table.json")
    put("release", to / "release")
    shutil.rmtree(to / "release" / ".stages")
    for path in (to / "models").rglob("effort.json"):
        path.unlink()


@click.command()
def main() -> None:
    """Write the golden files and the figures that they hold."""
    with tempfile.TemporaryDirectory() as scratch, chdir(scratch):
        for step in STEPS:
            click.echo(step.__name__.strip("_"))
            step()
        _kept(Path("kept-files"))
        figures = {name: read(Path("kept-files", name)) for name, read in FIGURES.items()}
        Path("kept-files", "expected.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(FILES, ignore_errors=True)
        shutil.copytree("kept-files", FILES)


if __name__ == "__main__":
    main()
