"""Packages (.pt2) that AOTInductor compiles from torch models: native code for one device, whose ports are float32."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ground.errors import BadInput, Missing
from ground.feeds import random_feeds
from ground.gpu import require_cuda
from ground.ports import OutputPort, Port

from .package_notes import BATCH, LARGEST_BATCH, PackageNotes
from .ports import GraphPort
from .precision import NORMS, Norms, typed_copy

Device = Literal["cpu", "cuda"]


def require_compiler() -> None:
    """Raise Missing if there is no C++ compiler."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise Missing("AOTInductor needs a C++ compiler and found none: install g++, or name one in CXX")


def package_from_model(
    model: nn.Module,
    path: Path,
    inputs: Sequence[Port],
    outputs: Sequence[OutputPort],
    *,
    precision: str,
    batch: int | None = None,
    device: Device = "cpu",
    threads: int | None = None,
    metadata: Mapping[str, str] | None = None,
    norms: Norms = NORMS,
) -> PackageNotes:
    """Compile a model to a package for one batch size, or for any from 1 to LARGEST_BATCH if `batch` is None.

    `threads` of a CPU are compiled in; None leaves their number to whoever runs the package. Raises Missing without a
    C++ compiler, or without the GPU of device cuda, and BadInput if AOTInductor can't compile the model.
    """
    require_compiler()
    if device == "cuda":
        require_cuda()
    typed = typed_copy(model, precision, norms=norms).requires_grad_(False).to(device)
    samples = tuple(torch.from_numpy(rows).to(device) for rows in random_feeds(inputs, batch or 2, seed=0).values())
    dims = {0: torch.export.Dim(BATCH, min=1, max=LARGEST_BATCH)}
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with torch.no_grad(), _any_batch():
            program = torch.export.export(
                typed, samples, dynamic_shapes=None if batch else tuple(dims for _ in samples)
            )
            notes = _notes(program, inputs, outputs, precision=precision, batch=batch, device=device)
            configs = {
                "aot_inductor.metadata": {**notes.as_metadata(), **(metadata or {})},
                # A convolution lets the compiler assume a batch of at least 2, and its code takes 1 all the same.
                "aot_inductor.check_lowerbound": False,
                "cpp.dynamic_threads": threads is None,
            }
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=configs)
    except (RuntimeError, ValueError, torch._dynamo.exc.TorchDynamoException) as error:
        raise BadInput(f"AOTInductor can't compile the model: {' '.join(str(error).split())[:300]}") from error
    finally:
        torch.set_num_threads(before)
    return notes


def _any_batch() -> Any:
    """Return a context in which programs of an open batch take a batch of one, too.

    Otherwise torch lets the compiler assume that an open size is at least 2.
    """
    from torch.fx.experimental import _config

    return _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]  # torch adds it


def _notes(
    program: torch.export.ExportedProgram,
    inputs: Sequence[Port],
    outputs: Sequence[OutputPort],
    *,
    precision: str,
    batch: int | None,
    device: Device,
) -> PackageNotes:
    given = [node.meta["val"] for node in program.graph.output_node().args[0]]
    if len(given) != len(outputs):
        names = ", ".join(port.name for port in outputs)
        raise ValueError(f"the program gives {len(given)} outputs, expected {len(outputs)}: {names}")
    first = batch or BATCH
    return PackageNotes(
        inputs=tuple(GraphPort(name=port.name, dtype=port.dtype, shape=(first, *port.shape)) for port in inputs),
        outputs=tuple(
            GraphPort(
                name=port.name, dtype=str(each.dtype).removeprefix("torch."), shape=(first, *map(int, each.shape[1:]))
            )
            for port, each in zip(outputs, given, strict=True)
        ),
        roles={port.name: port.role for port in outputs},
        precision=precision,
        device=device,
        torch=str(torch.__version__),
    )
