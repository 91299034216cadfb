"""One instance through the chain: sites, calibration, reduction, graphs, ONNX Runtime, engines."""

import math
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
from export.engine.build import build_engine
from export.engine.options import BatchProfile, BuildOptions
from ground.errors import BadInput, Missing

from .instances import Instance
from .models import beside, dense, inputs, outputs

BATCH, CALIBRATION, JUDGED = 8, 64, 32
MOST_INPUTS = 1024
PRESETS = ("none", "corp", "best")
PRECISIONS = ("fp32", "fp16")
DRAWS, CLOSE = 4, 1.2
"""How many draws of weights and inputs are told of where two presets err by less than this ratio in the first one."""
OTHER_SIZE = 1.5
"""The second image size that nothing removed is tried at, beside the instance's own."""
TARGET = "86"
PAIRS, VALUES = "traced queries and keys", "traced values"


def method(preset: str, sparsity: float) -> Method:
    shares = dict.fromkeys(("mlp_sparsity", "attention_sparsity", "conv_sparsity"), sparsity)
    return method_from_preset(preset, **shares, align_hidden=8, align_head=8, align_conv=8)


def away(got: Tensor, expected: Tensor) -> float:
    """Relative error."""
    return float((got - expected).norm() / expected.norm())


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A dense instance, its moments, and inputs that it is judged on."""

    checkpoint: Checkpoint
    moments: Moments
    judged: InputSet

    @property
    def model(self) -> nn.Module:
        return self.checkpoint.model

    def reduced(self, preset: str, sparsity: float) -> nn.Module:
        return reduce(self.model, self.moments, method(preset, sparsity)).model

    def error(self, candidate: nn.Module) -> float:
        """Of the outputs on the judged inputs."""
        exact = outputs(self.model, self.judged.batches(BATCH))
        return away(outputs(candidate, self.judged.batches(BATCH)), exact)


def needed(found: Tracing) -> int:
    """How many inputs to calibrate on: as many as give each layer half as many rows again as it has columns, within
    bounds.
    """
    counts = [CALIBRATION]
    for node_name, layer in found.hooked[1].items():
        node = found.by_node[node_name]
        places = sizes_at_one(node)[2:] if layer.weight.dim() > 2 else sizes_at_one(node)[:-1]
        counts.append(math.ceil(1.5 * layer.weight[0].numel() / math.prod(places)))
    return min(max(counts), MOST_INPUTS)


def subject_of(instance: Instance, directory: Path, *, seed: int = 0, **changes: Any) -> Subject:
    """Calibrated; `seed` draws weights and inputs. Raises BadInput where no family takes the model."""
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
    """What ONNX Runtime gives beside torch, the worst of two batch sizes, by precision."""
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
    """Attention sites of the half-precision graph and how many of them stayed one kernel in TensorRT-RTX; None where
    that is not installed.
    """
    whole = Checkpoint(model=candidate, architecture=subject.checkpoint.architecture, lineage={})
    path = directory / "engine.onnx"
    export_checkpoint(whole, path, precision="fp16")
    profile = BatchProfile(smallest=1, tuned=4, largest=8)
    try:
        built = build_engine(path, BuildOptions(backend="tensorrt-rtx", profiles=(profile,), sms=(TARGET,))).record
    except Missing:
        return None
    return {"sites": len(built.attention_sites), "fused": built.fused_attention or 0, "kernels": built.kernels or 0}


def errors_of(instance: Instance, subject: Subject, directory: Path) -> tuple[dict[str, float], int]:
    """Of half of everything by every preset; means over more draws where CORP and `best` are close in the first one,
    since a single network of random weights may favour either by chance; and of how many draws.
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
    """What the outputs change by where nothing is removed, at one image size or two."""
    sizes = {"own": subject.error(subject.reduced("best", 0.0))}
    if "img_size" in instance.kwargs:
        size = int(OTHER_SIZE * instance.kwargs["img_size"])
        other = subject_of(instance, directory / "other", img_size=size)
        sizes[str(size)] = other.error(other.reduced("best", 0.0))
    return sizes


def row_of(instance: Instance, directory: Path) -> dict[str, Any]:
    """Everything that is told of an instance; of one that no family takes the reason."""
    row: dict[str, Any] = {"source": instance.source, "family": instance.family, "name": instance.name}
    try:
        subject = subject_of(instance, directory / "own")
    except BadInput as refusal:
        return row | {"refused": str(refusal)}
    sites = sites_of(subject.model)
    kinds = Counter(OPTION_KINDS.get(site.kind, site.kind) for site in sites.every)
    own = Counter(site.kind for site in sites.every)
    half = subject.reduced("best", 0.5)
    errors, draws = errors_of(instance, subject, directory)
    return row | {
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
