"""Model directories as perf times them: run by torch, compiled ahead of time, or exported to a graph first."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from corp_deploy.families.family import input_ports, output_ports
from corp_deploy.invocation.running import RunOptions
from corp_deploy.store.checkpoint import WEIGHTS, Checkpoint, save
from corp_deploy.store.dense_model import model_of_directory
from corp_deploy.store.fitted import fitted_of_lineage
from corp_deploy.store.onnx_file import export_checkpoint
from perf.runners.module import ModuleRunner

from .contender import Contender, contender_from_graph, facts_of_file
from .torch_package import compiled_contender, costs_of


def _from_module(name: str, checkpoint: Checkpoint, weights: Path, running: RunOptions) -> Contender:
    inputs = input_ports(checkpoint.model)
    open_module = partial(
        ModuleRunner,
        checkpoint.model,
        inputs=inputs,
        outputs=output_ports(checkpoint.model),
        device=running.device or "cpu",
        mode=running.mode or "eager",
        precision=running.dtype or "fp32",
        threads=running.threads,
        flush_l2=bool(running.flush_l2),
        label=weights.parent.name,
    )
    return Contender(name=name, open=open_module, inputs=inputs, **costs_of(checkpoint), **facts_of_file(weights))


def contender_from_directory(
    name: str, path: Path, running: RunOptions, scratch: Path, batches: Sequence[int]
) -> Contender:
    """A model as `running` has it; what is exported or compiled for that goes to `scratch`."""
    checkpoint = model_of_directory(path)
    fitted = fitted_of_lineage(checkpoint.lineage, where=str(path))
    if running.backend == "torch":
        if not (path / WEIGHTS).is_file():  # a snapshot, whose weights may be of another kind or in several files
            path = scratch / name / path.name
            save(checkpoint, path)
        made = _from_module(name, checkpoint, path / WEIGHTS, running)
    elif running.backend == "aotinductor":
        made = compiled_contender(name, checkpoint, scratch / f"{name}.pt2", running, path.name, batches)
    else:
        graph = scratch / f"{name}.onnx"
        export_checkpoint(checkpoint, graph, precision="fp32")
        made = contender_from_graph(name, graph, running)
    return replace(made, fitted=fitted)
