"""Model directories and packages as subjects of a benchmark: run by torch, compiled by AOTInductor, or exported."""

import copy
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs, parameters
from corp_deploy.families.family import input_ports, output_ports
from corp_deploy.invocation.running import RunOptions
from corp_deploy.spec.trusted_code import refuse_untrusted
from corp_deploy.store.checkpoint import WEIGHTS, Checkpoint, save
from corp_deploy.store.dense_model import model_of_directory
from corp_deploy.store.fitted import fitted_of_lineage
from corp_deploy.store.onnx_file import export_checkpoint
from ground.arrays import array_from_npy
from ground.errors import BadInput, Missing
from ground.feeds import random_feeds
from ground.ports import Port
from perf.runners.module import DTYPES, ModuleRunner, Precision
from perf.runners.torch_package import PackageRunner

from .contender import Contender, contender_from_graph, facts_of_file


def _costs_of(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"macs": macs(checkpoint.model), "params": parameters(checkpoint.model)}


LARGEST_BATCH = 1024


class _Float32Borders(nn.Module):
    """A module that computes in another type, with inputs and outputs in float32."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = self.module(*(each.to(self.dtype) if each.is_floating_point() else each for each in inputs))
        return tuple(each.float() for each in ((outputs,) if isinstance(outputs, Tensor) else outputs))


def compile_package(
    checkpoint: Checkpoint, path: Path, *, precision: Precision, threads: int | None, single: bool = False
) -> None:
    """Compile the model to a package for any batch size from 2, or with `single` for size 1 only.

    The package keeps the number of threads that it is compiled with. Raises Missing if there is no C++ compiler, and
    BadInput if AOTInductor can't compile the model.
    """
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise Missing("AOTInductor needs a C++ compiler and found none: install g++, or name one in CXX")
    dtype = DTYPES[precision]
    module = _Float32Borders(copy.deepcopy(traced_model.exportable(checkpoint.model)).to(dtype), dtype).eval()
    rows = random_feeds(input_ports(checkpoint.model), 1 if single else 2, seed=0).values()
    inputs = tuple(map(torch.from_numpy, rows))
    batch = torch.export.Dim("batch", min=2, max=LARGEST_BATCH)
    shapes = None if single else (tuple({0: batch} for _ in inputs),)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with torch.no_grad():
            program = torch.export.export(module, inputs, dynamic_shapes=shapes)
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    except (RuntimeError, ValueError, torch._dynamo.exc.TorchDynamoException) as error:
        reason = " ".join(str(error).split())[:300]
        name = checkpoint.architecture.name
        raise BadInput(f"{name}: AOTInductor can't compile it: {reason}") from error
    finally:
        torch.set_num_threads(before)


def port_of_images(images: Path | None, package: Path) -> Port:
    """Return a package's input port by the shape of its images; raise BadInput unless `images` is a .npy file."""
    if images is None or images.suffix != ".npy":
        raise BadInput(
            f"{package}: a package doesn't record its inputs; expected --images FILE.npy with preprocessed inputs "
            f"[N, ...] of its size, got {images or 'none'}"
        )
    try:
        shape = array_from_npy(images, mapped=True).shape
    except OSError as error:
        raise BadInput(f"{images}: can't be read as an array ({error})") from None
    return Port(name="images", shape=tuple(shape[1:]))


def contender_from_package(name: str, path: Path, images: Path | None, running: RunOptions) -> Contender:
    """Open a package of AOTInductor; raise BadInput unless its code is trusted."""
    refuse_untrusted(f"{path} (a package of AOTInductor)")
    inputs = (port_of_images(images, path),)
    opened = partial(PackageRunner, path, inputs=inputs, threads=running.threads)
    return Contender(name=name, open=opened, inputs=inputs, **facts_of_file(path))


def _compiled_contender(
    name: str, checkpoint: Checkpoint, path: Path, running: RunOptions, label: str, batches: Sequence[int]
) -> Contender:
    """Compile a model to `path` with AOTInductor; raise BadInput for batch size 1 together with other sizes."""
    if 1 in batches and len(batches) > 1:
        others = ",".join(str(batch) for batch in batches if batch > 1)
        raise BadInput(
            f"--batch {','.join(map(str, batches))}: AOTInductor compiles a single input as a program of its own; "
            f"measure --batch 1 by itself, and --batch {others} in another run"
        )
    precision: Precision = running.dtype or "fp32"
    single = list(batches) == [1]
    compile_package(checkpoint, path, precision=precision, threads=running.threads, single=single)
    inputs = input_ports(checkpoint.model)
    open_package = partial(
        PackageRunner,
        path,
        inputs=inputs,
        outputs=output_ports(checkpoint.model),
        batch="1" if single else f"any from 2 to {LARGEST_BATCH}",
        precision=precision,
        threads=running.threads,
        label=label,
    )
    return Contender(
        name=name,
        open=open_package,
        inputs=inputs,
        static_batch=1 if single else None,
        **_costs_of(checkpoint),
        **facts_of_file(path),
    )


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
    return Contender(name=name, open=open_module, inputs=inputs, **_costs_of(checkpoint), **facts_of_file(weights))


def contender_from_directory(
    name: str, path: Path, running: RunOptions, scratch: Path, batches: Sequence[int]
) -> Contender:
    """Return a model directory to be timed as `running` asks; exported and compiled files go to `scratch`."""
    checkpoint = model_of_directory(path)
    fitted = fitted_of_lineage(checkpoint.lineage, where=str(path))
    if running.backend == "torch":
        if not (path / WEIGHTS).is_file():  # a snapshot, whose weights may be of another kind or in several files
            path = scratch / name / path.name
            save(checkpoint, path)
        made = _from_module(name, checkpoint, path / WEIGHTS, running)
    elif running.backend == "aotinductor":
        made = _compiled_contender(name, checkpoint, scratch / f"{name}.pt2", running, path.name, batches)
    else:
        graph = scratch / f"{name}.onnx"
        export_checkpoint(checkpoint, graph, precision="fp32")
        made = contender_from_graph(name, graph, running)
    return replace(made, fitted=fitted)
