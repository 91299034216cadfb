"""A model compiled ahead of time by torch (AOTInductor), for the CPU, with a batch that is free."""

import copy
import os
import shutil
from collections.abc import Sequence
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
from corp_deploy.store.checkpoint import Checkpoint
from ground.arrays import array_from_npy
from ground.errors import BadInput, Missing
from ground.feeds import random_feeds
from ground.ports import Port
from perf.runners.module import DTYPES, Precision
from perf.runners.torch_package import PackageRunner

from .contender import Contender, facts_of_file


def costs_of(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"macs": macs(checkpoint.model), "params": parameters(checkpoint.model)}


LARGEST_BATCH = 1024
SEVERAL = f"any from 2 to {LARGEST_BATCH}"


class _Borders(nn.Module):
    """A module with float32 outside and another type inside."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = self.module(*(each.to(self.dtype) if each.is_floating_point() else each for each in inputs))
        return tuple(each.float() for each in ((outputs,) if isinstance(outputs, Tensor) else outputs))


def compile_package(
    checkpoint: Checkpoint, path: Path, *, precision: Precision, threads: int | None, single: bool = False
) -> None:
    """Write the model as a package, for a free batch of 2 or more, or for a `single` input, which torch takes for
    another program. Its loops keep the number of threads that they are compiled with.

    Raises Missing without a C++ compiler, BadInput for a model that torch.export can't write so.
    """
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise Missing("AOTInductor needs a C++ compiler and found none: install g++, or name one in CXX")
    dtype = DTYPES[precision]
    module = _Borders(copy.deepcopy(traced_model.exportable(checkpoint.model)).to(dtype), dtype).eval()
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
    """Return a package's input by the images that it is fed; raise BadInput without them."""
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
    """Return a package of somebody's; raise BadInput where its code may not be run."""
    refuse_untrusted(f"{path} (a package of AOTInductor)")
    inputs = (port_of_images(images, path),)
    opened = partial(PackageRunner, path, inputs=inputs, threads=running.threads)
    return Contender(name=name, open=opened, inputs=inputs, **facts_of_file(path))


def compiled_contender(
    name: str, checkpoint: Checkpoint, path: Path, running: RunOptions, label: str, batches: Sequence[int]
) -> Contender:
    """Compile a package here; raise BadInput for a batch of 1 beside others."""
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
        batch="1" if single else SEVERAL,
        precision=precision,
        threads=running.threads,
        label=label,
    )
    return Contender(
        name=name,
        open=open_package,
        inputs=inputs,
        static_batch=1 if single else None,
        **costs_of(checkpoint),
        **facts_of_file(path),
    )
