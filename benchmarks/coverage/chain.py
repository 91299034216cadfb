"""The chain of one instance: sites, calibration, reduction, graphs, ONNX Runtime, engines."""

import math
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor, nn

from benchmarks.coverage.instances import Instance
from benchmarks.coverage.models import beside, dense, inputs, outputs
from benchmarks.speed.random_models import build_rtx
from calib.inputs import InputSet, chunks, tensors_by_name
from calib.moments import Moments
from corp_deploy.families.family import CONVOLUTIONS, OPTION_KINDS, input_ports, sites_of
from corp_deploy.families.traced_model import tracing
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.traced.models.module import Tracing
from corp_deploy.traced.programs.program import sizes_at_one
from ground.errors import BadInput, Missing

BATCH, CALIBRATION, JUDGED = 8, 64, 32
MOST_INPUTS = 1024
PRESETS = ("none", "corp", "best")
PRECISIONS = ("fp32", "fp16")
DRAWS, CLOSE = 4, 1.2
"""The number of draws of weights and inputs if the errors of two presets differ by less than the ratio CLOSE."""
OTHER_SIZE = 1.5
"""The ratio of a second image size to the instance's own, at which nothing is removed."""
TARGET = "86"
PAIRS, VALUES = "traced queries and keys", "traced values"


def method(preset: str, sparsity: float) -> Method:
    shares = dict.fromkeys(("mlp_sparsity", "attention_sparsity", "conv_sparsity"), sparsity)
    return method_from_preset(preset, **shares, align_hidden=8, align_head=8, align_conv=8)


def away(got: Tensor, expected: Tensor) -> float:
    """Return the relative error."""
    return float((got - expected).norm() / expected.norm())


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A dense instance, its moments, and the inputs that judge it."""

    checkpoint: Checkpoint
    moments: Moments
    judged: InputSet

    @property
    def model(self) -> nn.Module:
        return self.checkpoint.model

    def reduced(self, preset: str, sparsity: float) -> nn.Module:
        return reduce(self.model, self.moments, method(preset, sparsity)).model

    def error(self, candidate: nn.Module) -> float:
        """Return the error of the outputs on the judging inputs."""
        exact = outputs(self.model, self.judged.batches(BATCH))
        return away(outputs(candidate, self.judged.batches(BATCH)), exact)


def needed(found: Tracing) -> int:
    """Return the number of inputs, within bounds, that gives each layer 1.5 times as many rows as columns."""
    counts = [CALIBRATION]
    for node_name, layer in found.hooked[1].items():
        node = found.by_node[node_name]
        places = sizes_at_one(node)[2:] if layer.weight.dim() > 2 else sizes_at_one(node)[:-1]
        counts.append(math.ceil(1.5 * layer.weight[0].numel() / math.prod(places)))
    return min(max(counts), MOST_INPUTS)


def subject_of(instance: Instance, directory: Path, *, seed: int = 0, **changes: Any) -> Subject:
    """Return an instance, calibrated; `seed` draws weights and inputs. Raises BadInput if no family reads the model."""
    directory.mkdir(parents=True)
    checkpoint = dense(instance, directory, seed=seed, **changes)
    fitted = inputs(instance, checkpoint.model, needed(tracing(checkpoint.model)), 2 * seed + 1, directory)
    has_heads = any(site.kind == PAIRS for site in sites_of(checkpoint.model).every)
    statistics = Statistics(attention_system=has_heads)
    taken = calibrate(checkpoint, fitted, batch_size=BATCH, statistics=statistics)
    return Subject(
        checkpoint=checkpoint, moments=taken, judged=inputs(instance, checkpoint.model, JUDGED, 2 * seed + 2, directory)
    )


def graph_errors(subject: Subject, candidate: nn.Module, directory: Path) -> dict[str, float]:
    """Return the error of ONNX Runtime against torch by precision, the worst of two batch sizes."""
    whole = Checkpoint(model=candidate, architecture=subject.checkpoint.architecture, lineage={})
    errors = {}
    for precision in PRECISIONS:
        path = directory / f"{precision}.onnx"
        export_checkpoint(whole, path, precision=precision)
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        types = {port.name: np.float16 if port.type == "tensor(float16)" else None for port in session.get_inputs()}
        names = [port.name for port in input_ports(candidate)]
        (batch,) = islice(subject.judged.batches(BATCH), 1)
        worst = 0.0
        for count in (1, BATCH):
            part = next(chunks(batch, count))
            arrays = dict(zip(names, (tensor.numpy() for tensor in tensors_by_name(part).values()), strict=True))
            feed = {name: array.astype(types[name] or array.dtype) for name, array in arrays.items() if name in types}
            got = beside([torch.from_numpy(each.astype(np.float64)) for each in session.run(None, feed)])
            apart = away(got, outputs(candidate, iter([part])))
            worst = max(worst, apart if math.isfinite(apart) else math.inf)
        errors[precision] = worst
    return errors


def fused(subject: Subject, candidate: nn.Module, directory: Path) -> Mapping[str, int] | None:
    """Return the numbers of attention sites, of fused ones and of kernels in the FP16 plan of TensorRT-RTX.

    Without TensorRT-RTX, return None.
    """
    whole = Checkpoint(model=candidate, architecture=subject.checkpoint.architecture, lineage={})
    path = directory / "engine.onnx"
    export_checkpoint(whole, path, precision="fp16")
    try:
        built = build_rtx(path, TARGET, "1:4:8")
    except Missing:
        return None
    return {"sites": len(built.attention_sites), "fused": built.fused_attention or 0, "kernels": built.kernels or 0}


def errors_of(instance: Instance, subject: Subject, directory: Path) -> tuple[dict[str, float], int]:
    """Return the error of every preset with half of everything removed, and the number of draws that it is a mean of.

    There are several draws if CORP and `best` are close in the first one, since one network with random weights may
    favour either by chance.
    """

    def drawn(each: Subject) -> dict[str, float]:
        return {preset: each.error(each.reduced(preset, 0.5)) for preset in PRESETS}

    draws = [drawn(subject)]
    one, other = sorted((draws[0]["corp"], draws[0]["best"]))
    if other < CLOSE * one:
        seeds = range(1, DRAWS)
        draws += [drawn(subject_of(instance, directory / f"draw-{seed}", seed=seed)) for seed in seeds]
    return {preset: sum(errors[preset] for errors in draws) / len(draws) for preset in PRESETS}, len(draws)


def identities(instance: Instance, subject: Subject, directory: Path) -> dict[str, float]:
    """Return the error of the outputs with nothing removed, at one or two image sizes."""
    sizes = {"own": subject.error(subject.reduced("best", 0.0))}
    if "img_size" in instance.kwargs:
        size = int(OTHER_SIZE * instance.kwargs["img_size"])
        other = subject_of(instance, directory / "other", img_size=size)
        sizes[str(size)] = other.error(other.reduced("best", 0.0))
    return sizes


def row_of(instance: Instance) -> dict[str, Any]:
    """Return the figures of an instance, or the reason why no family reads it."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            subject = subject_of(instance, Path(scratch) / "own")
        except BadInput as refusal:
            return {"refused": str(refusal)}
        return figures_of(instance, subject, Path(scratch))


def figures_of(instance: Instance, subject: Subject, directory: Path) -> dict[str, Any]:
    """Return sites, errors, graphs and engines of an instance."""
    sites = sites_of(subject.model)
    kinds = Counter(OPTION_KINDS.get(site.kind, site.kind) for site in sites.every)
    own = Counter(site.kind for site in sites.every)
    half = subject.reduced("best", 0.5)
    errors, draws = errors_of(instance, subject, directory)
    return {
        "class": type(subject.model).__name__,
        "mlps": kinds["channels"],
        "attentions": max(own[PAIRS], own[VALUES]),
        "rows": kinds[CONVOLUTIONS],
        "kept": {"qk": max(own[VALUES] - own[PAIRS], 0), "v": max(own[PAIRS] - own[VALUES], 0)},
        "reasons": sorted({refusal.reason for refusal in sites.refused}),
        "identity": identities(instance, subject, directory),
        "inputs": subject.moments.images,
        "draws": draws,
        "errors": errors,
        "graphs": graph_errors(subject, half, directory),
        "engines": {
            "dense": fused(subject, subject.model, directory),
            "reduced": fused(subject, half, directory),
        },
    }
