"""A model compiled ahead of time by torch (AOTInductor), for the CPU, with a batch that is free."""

import copy
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from corp_deploy.families.family import family_of, input_ports, output_ports
from corp_deploy.families.model_cost import macs, parameters
from corp_deploy.families.trusted_code import refuse_untrusted
from corp_deploy.invocation.running import RunOptions
from corp_deploy.store.checkpoint import Checkpoint
from ground.errors import BadInput, Missing
from ground.feeds import noise_of_ports
from ground.files import sha256_of_file
from ground.ports import Port
from perf.bench.bench import Subject
from perf.runners.module import DTYPES, Precision
from perf.runners.torch_package import PackageRunner

from .contender import Contender

LARGEST_BATCH = 1024
BATCHES = f"any from 1 to {LARGEST_BATCH}"


class _Borders(nn.Module):
    """Float32 outside, another type inside."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = self.module(*(each.to(self.dtype) if each.is_floating_point() else each for each in inputs))
        return tuple(each.float() for each in ((given,) if isinstance(given, Tensor) else given))


def compile_package(checkpoint: Checkpoint, path: Path, *, precision: Precision, threads: int | None) -> None:
    """Write the model as a package; its loops keep the number of threads that they are compiled with.

    Raises Missing without a C++ compiler, BadInput for a model that torch.export can't write with a free batch.
    """
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise Missing("AOTInductor needs a C++ compiler and found none: install g++, or name one in CXX")
    family, dtype = family_of(checkpoint.model), DTYPES[precision]
    module = _Borders(copy.deepcopy(family.exportable(checkpoint.model)).to(dtype), dtype).eval()
    inputs = tuple(torch.from_numpy(rows) for rows in noise_of_ports(input_ports(checkpoint.model), 2, seed=0).values())
    batch = torch.export.Dim("batch", min=1, max=LARGEST_BATCH)
    before, settings = torch.get_num_threads(), cast(Any, torch.fx.experimental._config)
    torch.set_num_threads(threads or before)
    try:
        # Else batches of 1 are refused by the compiled code, as torch takes a size of 1 for another program.
        with torch.no_grad(), settings.patch(backed_size_oblivious=True):
            program = torch.export.export(module, inputs, dynamic_shapes=(tuple({0: batch} for _ in inputs),))
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    except (RuntimeError, ValueError, torch._dynamo.exc.TorchDynamoException) as error:
        reason = " ".join(str(error).split())[:300]
        name = checkpoint.architecture.name
        raise BadInput(f"{name}: AOTInductor can't compile it with a free batch: {reason}") from error
    finally:
        torch.set_num_threads(before)


def port_of_images(images: Path | None, package: Path) -> Port:
    """What a package takes is told by the images that it is fed. Raises BadInput without them."""
    if images is None or images.suffix != ".npy":
        raise BadInput(
            f"{package}: a package doesn't tell what it takes; expected --images FILE.npy with preprocessed inputs "
            f"[N, ...] of its size, got {images or 'none'}"
        )
    try:
        shape = np.load(images, mmap_mode="r", allow_pickle=False).shape
    except (OSError, ValueError) as error:
        raise BadInput(f"{images}: can't be read as an array ({error})") from None
    return Port(name="images", shape=tuple(shape[1:]))


def contender_from_package(name: str, path: Path, images: Path | None, running: RunOptions) -> Contender:
    """A package that is handed over. Raises BadInput where its code may not be run."""
    refuse_untrusted(f"{path} (a package of AOTInductor)")
    inputs = (port_of_images(images, path),)
    subject = Subject(
        name=name,
        open=partial(PackageRunner, path, inputs=inputs, threads=running.threads),
        size_bytes=path.stat().st_size,
        sha256=sha256_of_file(path),
    )
    return Contender(subject=subject, inputs=inputs, static_batch=None)


def compiled_contender(name: str, checkpoint: Checkpoint, path: Path, running: RunOptions, label: str) -> Contender:
    """A model as a package that is made here, and so no foreign code; `label` stands in the record."""
    precision: Precision = running.dtype or "fp32"
    compile_package(checkpoint, path, precision=precision, threads=running.threads)
    inputs = input_ports(checkpoint.model)
    open_package = partial(
        PackageRunner,
        path,
        inputs=inputs,
        outputs=output_ports(checkpoint.model),
        batch=BATCHES,
        precision=precision,
        threads=running.threads,
        label=label,
    )
    subject = Subject(
        name=name,
        open=open_package,
        macs=macs(checkpoint.model),
        params=parameters(checkpoint.model),
        size_bytes=path.stat().st_size,
        sha256=sha256_of_file(path),
    )
    return Contender(subject=subject, inputs=inputs, static_batch=None)
