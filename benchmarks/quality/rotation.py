"""What a rotation of reduced heads (`reduce --rotate`) changes in FP32, FP16 and simulated INT8.

    python -m benchmarks.quality.rotation --output benchmarks/results/rotation.json

Preset best with square heads, attention alone reduced, from the same moments with and without the rotation. INT8 is
symmetric with one scale a tensor, its range that of the calibration images: queries and keys as they enter the dot
product, then values and what enters the output projection. Errors are of held-out images against the same reduced model
in FP32: of each head's logits (all sites together) and of the model's outputs.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import click
import torch
from torch import Tensor, nn

from benchmarks.quality.layer_polish import BATCH, SUBJECTS, Subject, outputs
from benchmarks.quality.timm_sites import Attention, attentions
from calib.inputs import InputSet, map_tensors, run_model
from calib.moments import Moments
from corp_deploy.families import traced_model
from corp_deploy.machine import versions
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint
from ground.errors import Missing
from ground.files import write_json

NAMES = ("digits", "dinov2")
SHARES = (0.5, 0.75)
Parts = Mapping[str, Tensor]


def relative(got: Tensor, exact: Tensor) -> float:
    """||got - exact|| / ||exact||."""
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def parts_of(attention: Attention, rows: Tensor) -> Parts:
    """Queries, keys and values of all heads among the rows that the fused projection gives."""
    qk, v = attention.heads * attention.qk, attention.heads * attention.v
    return dict(zip("qkv", rows.split((qk, qk, v), -1), strict=True))


Hear = Callable[[Attention, Tensor], Tensor | None]


def heard(model: nn.Module, inputs: InputSet, rows: Hear, entering: Hear) -> Tensor:
    """The outputs where what each fused projection gives, and what enters each output projection, is heard; a tensor
    given back replaces it.
    """
    running = traced_model.exportable(model)
    for attention in attentions(model):
        first, last = (running.get_submodule(f"{attention.name}.{layer}") for layer in ("qkv", "proj"))
        first.register_forward_hook(lambda _, __, y, of=attention: rows(of, y))
        last.register_forward_pre_hook(lambda _, given, of=attention: entering(of, given[0]))
    return outputs(running, inputs)


def ranges(model: nn.Module, inputs: InputSet) -> dict[str, float]:
    """The largest magnitude of each tensor that is made INT8, by attention and part."""
    found: dict[str, float] = {}

    def hear(attention: Attention, name: str, x: Tensor) -> None:
        key = f"{attention.name}.{name}"
        found[key] = max(found.get(key, 0.0), float(x.abs().max()))

    def rows(attention: Attention, y: Tensor) -> None:
        for name, part in parts_of(attention, y).items():
            hear(attention, name, part)

    heard(model, inputs, rows, lambda attention, x: hear(attention, "z", x))
    return found


def rounded(x: Tensor, largest: float) -> Tensor:
    """Symmetric INT8 with one scale."""
    scale = largest / 127.0
    return (x / scale).round().clamp(-127, 127) * scale


def outputs_in_int8(model: nn.Module, inputs: InputSet, largest: Mapping[str, float], parts: str) -> Tensor:
    """With these parts of every attention in INT8."""

    def rows(attention: Attention, y: Tensor) -> Tensor:
        by_part = parts_of(attention, y)
        new = [rounded(x, largest[f"{attention.name}.{name}"]) if name in parts else x for name, x in by_part.items()]
        return torch.cat(new, -1)

    def entering(attention: Attention, x: Tensor) -> Tensor | None:
        return rounded(x, largest[f"{attention.name}.z"]) if "z" in parts else None

    return heard(model, inputs, rows, entering)


def logit_error(model: nn.Module, inputs: InputSet, largest: Mapping[str, float]) -> float:
    """Of q k' with both in INT8, on the activations of FP32; the mean over the attentions."""
    lost, energy = dict[str, float](), dict[str, float]()

    def rows(attention: Attention, y: Tensor) -> None:
        parts, name = parts_of(attention, y), attention.name
        exact, got = (
            torch.einsum("bnhd,bmhd->bhnm", *(x.double().unflatten(-1, (attention.heads, -1)) for x in pair))
            for pair in (
                (parts["q"], parts["k"]),
                tuple(rounded(parts[side], largest[f"{name}.{side}"]) for side in "qk"),
            )
        )
        lost[name] = lost.get(name, 0.0) + float((got - exact).square().sum())
        energy[name] = energy.get(name, 0.0) + float(exact.square().sum())

    heard(model, inputs, rows, lambda _, __: None)
    return mean(float((lost[name] / energy[name]) ** 0.5) for name in lost)


def in_fp16(model: nn.Module, inputs: InputSet) -> Tensor:
    """With weights and activations of every layer in float16."""
    half = copy.deepcopy(model).half()
    with torch.inference_mode():
        return torch.cat([run_model(half, map_tensors(batch, Tensor.half)) for batch in inputs.batches(BATCH)]).double()


def rows_of(subject: Subject, moments: Moments, share: float) -> Iterator[dict[str, Any]]:
    """Without the rotation, and with it."""
    method = method_from_preset("best", attention_sparsity=share, geometry="square", align_head=subject.align)
    plain = outputs(reduce(subject.dense, moments, replace(method, rotates=False)).model, subject.judging)
    for rotates in (False, True):
        model = reduce(subject.dense, moments, replace(method, rotates=rotates)).model
        exact, largest = outputs(model, subject.judging), ranges(model, subject.inputs)
        row = {
            "model": subject.name,
            "share": share,
            "width": attentions(model)[0].qk,
            "rotates": rotates,
            "fp32": relative(exact, plain),
            "fp16": relative(in_fp16(model, subject.judging), exact),
            "int8_logits": logit_error(model, subject.judging, largest),
            "int8_qk": relative(outputs_in_int8(model, subject.judging, largest, "qk"), exact),
            "int8_v": relative(outputs_in_int8(model, subject.judging, largest, "vz"), exact),
        }
        click.echo(str(row))
        yield row


@click.command()
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--model", "names", type=click.Choice(NAMES), multiple=True, default=NAMES)
@click.option("--crops", type=click.IntRange(min=16), default=128, show_default=True, help="Of photographs.")
def main(output: Path, names: Sequence[str], crops: int) -> None:
    """Measure and write the record, again after each row."""
    torch.set_num_threads(1)
    record = {"kind": "benchmarks/rotation", "version": 1, "versions": versions(), "crops": crops}
    rows, absent = list[dict[str, Any]](), dict[str, str]()
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                subject = SUBJECTS[name](Path(scratch), crops)
            except Missing as reason:
                absent[name] = str(reason)
                continue
            checkpoint = Checkpoint(model=subject.dense, architecture=Architecture(name=name, kwargs={}), lineage={})
            moments = calibrate(checkpoint, subject.inputs, batch_size=BATCH)
            for share in SHARES:
                for row in rows_of(subject, moments, share):
                    rows.append(row)
                    write_json(output, record | {"absent": absent, "rows": rows})


if __name__ == "__main__":
    main()
