"""Models with random weights and images of noise: their times, graphs and plans depend on shapes alone."""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from corp_deploy.families.family import input_ports
from corp_deploy.invocation.running import RunOptions
from corp_deploy.proof.speed import time_models
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import uniform_widths
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.widths import HeadGeometry
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.traced.models.narrowed_model import at_widths
from export.engine.build import build_engine
from export.engine.options import BatchProfile, BuildOptions
from export.engine.record import EngineRecord
from perf.record.runs import Bench
from perf.timing.laps import Plan

SPARSITY = 0.5


def random_checkpoint(name: str, **kwargs: object) -> Checkpoint:
    """Return a dense model with random weights, the same for every call."""
    torch.manual_seed(0)
    architecture = Architecture(name=name, kwargs=kwargs)
    return Checkpoint(model=dense_from_architecture(architecture), architecture=architecture, lineage={})


def halved(dense: Checkpoint, geometry: HeadGeometry) -> Checkpoint:
    """Return the model with half the hidden channels and half the head width, without a fit of the weights."""
    method = method_from_preset("best", mlp_sparsity=SPARSITY, attention_sparsity=SPARSITY, geometry=geometry)
    return replace(dense, model=at_widths(dense.model, uniform_widths(dense.model, method)))


def save_noise(model: nn.Module, count: int, path: Path) -> Path:
    """Write images of noise for a model."""
    shape = input_ports(model)[0].shape
    np.save(path, np.random.default_rng(0).standard_normal((count, *shape), dtype=np.float32))
    return path


def time_pair(
    dense: Checkpoint, reduced: Checkpoint, batches: tuple[int, ...], plan: Plan, running: RunOptions | None = None
) -> Bench:
    """Time FP32 graphs of two models, interleaved in one process, by default in ONNX Runtime on two threads."""
    with tempfile.TemporaryDirectory() as scratch:
        graphs = Path(scratch) / "dense.onnx", Path(scratch) / "reduced.onnx"
        for checkpoint, path in zip((dense, reduced), graphs, strict=True):
            export_checkpoint(checkpoint, path, precision="fp32")
        return time_models(*graphs, batches=batches, plan=plan, running=running or RunOptions(threads=2))


def build_rtx(graph: Path, sm: str, batches: str = "1:8:64") -> EngineRecord:
    """Build a TensorRT-RTX plan of a graph. Raises Missing where TensorRT-RTX is not installed."""
    profile = BatchProfile.from_text(batches)
    return build_engine(graph, BuildOptions(backend="tensorrt-rtx", profiles=(profile,), sms=(sm,))).record
