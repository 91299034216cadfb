"""Inputs and outputs of modules: as a module declares them, or as a run on fake tensors shows."""

import logging
import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from corp_deploy.spec.architecture import Preprocessing
from corp_deploy.traced.models.array_inputs import (
    WRITE,
    ArraySpec,
    CallOrder,
    InputSpec,
    build_plain_batch,
    parameters_of,
    ports_as_line,
    read_outputs,
    read_ports,
    takes_by_place,
)
from corp_deploy.traced.models.module import Facts, device_of
from corp_deploy.traced.programs.program import copy_module
from ground.errors import BadInput
from ground.ports import Port, Role, image_port

from . import timm_library
from .timm_images import ImageSpec

SIDES = (224, 256, 384, 192, 128, 96, 64, 32, 28)  # the sizes of images that are tried, the most common first
BATCHES = (2, 3)  # the batch sizes of two runs, which show the axes of outputs that are the batch
FIXED_BATCHES = (32, 16, 8, 4, 2, 1)  # the batch sizes that are tried with a module that refuses BATCHES
PREPARED = {
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "crop_pct": 0.875,
    "interpolation": "bicubic",
    "crop_mode": "center",
}
"""The preprocessing of most classifiers of ImageNet in torchvision and timm."""


def facts_of_module(model: nn.Module, preprocessing: Preprocessing) -> Facts:
    """Return the inputs and outputs of a module.

    Inputs are those of its attribute `inputs`, else images of its `input_size`, else images of the first of SIDES with
    which it runs. Outputs are those of its attribute `outputs`, else all. Raises BadInput where these can't be found,
    or the module can't be run on them.
    """
    declared = getattr(model, "inputs", None)
    if isinstance(declared, Mapping) and declared:
        return facts_of_arrays(model, read_ports(model, declared))
    return facts_of_images(model, None, preprocessing)


def facts_of_arrays(model: nn.Module, ports: tuple[Port, ...]) -> Facts:
    return facts_with(model, ArraySpec(ports=ports), [port.name for port in ports])


def facts_of_images(
    model: nn.Module, shape: tuple[int, int, int] | None, preprocessing: Preprocessing, role: Role | None = None
) -> Facts:
    """Return inputs and outputs of a module of images of this shape, or of one found as in facts_of_module.

    With a `role` the module returns one tensor of this role. Raises BadInput as facts_of_module does.
    """
    needed = [name for name, is_needed in parameters_of(model).items() if is_needed]
    if len(needed) > 1:
        raise BadInput(f"{type(model).__name__}: its forward takes {', '.join(needed)}; {WRITE}")
    shape = shape or _shape_of_images(model)
    is_timms = type(model).__module__.startswith("timm.")
    config = timm_library.configured_image_spec(model, shape[1:]).config if is_timms else PREPARED
    prepared = {**config, **preprocessing.spread(shape[0]).settings}
    return facts_with(model, ImageSpec(shape=shape, config={**prepared, "input_size": shape}), needed, role)


def facts_with(model: nn.Module, spec: InputSpec, parameters: Sequence[str], role: Role | None = None) -> Facts:
    """Return inputs and outputs of a module whose `parameters` take the ports of `spec` in order; by position if empty.

    With a `role` the module returns one tensor of this role. Raises BadInput where it can't be run on the ports.
    """
    try:
        result, other = (_run(model, spec.ports, parameters, count) for count in BATCHES)
    except Exception as error:
        _refuse_written_batch(model, spec.ports, parameters, error)
        raise BadInput(
            f"{type(model).__name__} can't be run on {ports_as_line(spec.ports)}: {in_a_line(error)}. (a) If it takes "
            f"something else, {WRITE}; (b) control flow on values can't be traced: give a module without it; "
            "(c) if it takes one fixed size, give that size"
        ) from None
    outputs, inputs = read_outputs(model, result, other, BATCHES), {port.name for port in spec.ports}
    if role is not None:
        if len(outputs) > 1:
            names = ", ".join(each.port.name for each in outputs)
            raise BadInput(
                f"{type(model).__name__}: it gives {names}, expected one tensor; name that in its attribute `outputs`"
            )
        outputs = (replace(outputs[0], port=replace(outputs[0].port, role=role)),)
    calling = None
    if not (isinstance(result, Tensor) and takes_by_place(model, parameters)):
        calling = CallOrder(parameters=tuple(parameters), outputs=tuple(each.place for each in outputs))
    # Inputs and outputs of a graph need different names.
    names_apart = (f"output_{each.port.name}" if each.port.name in inputs else each.port.name for each in outputs)
    return Facts(
        spec=spec,
        outputs=tuple(replace(each.port, name=name) for each, name in zip(outputs, names_apart, strict=True)),
        classes=next((math.prod(each.shape[1:]) for each in outputs if each.port.role == "logits"), 0),
        calling=calling,
    )


def _refuse_written_batch(model: nn.Module, ports: Sequence[Port], parameters: Sequence[str], error: Exception) -> None:
    """Raise BadInput for a module that runs at one of FIXED_BATCHES, with the line of its code that raised `error`."""
    batch = next((count for count in FIXED_BATCHES if _runs(model, ports, parameters, count)), None)
    if batch is not None:
        raise BadInput(
            f"{type(model).__name__} runs at a batch of {batch} but not of every size, so a batch size is written "
            f"into its code{_line_of(error)}: {in_a_line(error)}. Take it from the input, as x.shape[0] or -1 in view "
            "and reshape, and let buffers and parameters have 1 in place of the batch"
        ) from None


def _runs(model: nn.Module, ports: Sequence[Port], parameters: Sequence[str], count: int) -> bool:
    try:
        _run(model, ports, parameters, count)
    except Exception:
        return False
    return True


def _line_of(error: Exception) -> str:
    """Return the file and line of the user's code that raised an error, to end a sentence; empty without any."""
    theirs = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(theirs)]
    if not frames:
        return ""
    last = frames[-1]
    code = f" ({last.line})" if last.line else ""
    return f", in {Path(last.filename).name} line {last.lineno}{code}"


@torch.no_grad()
def _run(model: nn.Module, ports: Sequence[Port], parameters: Sequence[str], count: int) -> Any:
    own = copy_module(model)
    with _unlogged(), FakeTensorMode(allow_non_fake_inputs=True):
        inputs = build_plain_batch(ports, count, device_of(model))
        try:
            return own(**dict(zip(parameters, inputs, strict=True))) if parameters else own(*inputs)
        except fake_tensor.DataDependentOutputException as error:
            raise BadInput(
                f"{type(model).__name__} can't be traced: it looks at values ({error}), as .item() or an `if` on a "
                "tensor does; give a module without it"
            ) from error


@contextmanager
def _unlogged() -> Iterator[None]:
    """Silence torch's log of failed operations, since the caller raises one message or tries another size."""
    log = logging.getLogger(fake_tensor.__name__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _shape_of_images(model: nn.Module) -> tuple[int, int, int]:
    """Return the image shape [C,H,W] that the module declares, or a square one of the first of SIDES that runs."""
    input_size = getattr(model, "input_size", None)
    if isinstance(input_size, list | tuple) and len(input_size) == 3:
        return (int(input_size[0]), int(input_size[1]), int(input_size[2]))
    channels = next((each.in_channels for each in model.modules() if isinstance(each, nn.Conv2d)), 3)
    reason = ""
    for side in SIDES:
        try:
            _run(model, [image_port((channels, side, side))], (), BATCHES[0])
        except BadInput:
            raise
        except Exception as error:
            reason = reason or in_a_line(error)
            continue
        return channels, side, side
    for side in SIDES:
        if any(_runs(model, [image_port((channels, side, side))], (), count) for count in FIXED_BATCHES):
            return channels, side, side  # the caller refuses its fixed batch size
    raise BadInput(
        f"{type(model).__name__}: it runs with no known size of images ({reason}); (a) set its attribute `input_size = "
        f"(3, height, width)`; (b) if not images, {WRITE}; (c) give the size to corp_deploy.sites(..., inputs=...)"
    )


def in_a_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line[:200]}" if line else type(error).__name__
