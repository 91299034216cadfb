"""Example tensors for tracing, one for each port of a model."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ground.errors import BadInput
from ground.ports import Port

DTYPES = {
    "float32": torch.float32,
    "uint8": torch.uint8,
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
}


def example_inputs(ports: Sequence[Port], batch: int, examples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By name one tensor [batch, *shape] for each port, in their order.

    `examples` holds one item of a port [*shape] by its name, which is repeated over the batch. A port without one gets
    zeros: every embedding has a row 0. Masks, ports of integers or bools whose name ends with `mask`, get ones.

    Raises BadInput for an example of no port, or of another type or shape than its port.
    """
    unknown = sorted(examples.keys() - {port.name for port in ports})
    if unknown:
        raise BadInput(f"examples: {unknown[0]!r} is no input; the inputs are {', '.join(port.name for port in ports)}")
    items = {
        port.name: _checked(examples[port.name], port) if port.name in examples else _plain(port) for port in ports
    }
    return {name: item.repeat(batch, *(1 for _ in item.shape)) for name, item in items.items()}


def _plain(port: Port) -> Tensor:
    mask = port.dtype != "float32" and port.name.endswith("mask")
    return torch.full(port.shape, int(mask), dtype=DTYPES[port.dtype])


def _checked(example: Tensor, port: Port) -> Tensor:
    if (example.dtype, tuple(example.shape)) != (DTYPES[port.dtype], port.shape):
        got = f"{str(example.dtype).removeprefix('torch.')} {list(example.shape)}"
        raise BadInput(f"examples: {port.name} must be {port.dtype} {list(port.shape)}, without a batch, got {got}")
    return example.detach().cpu()
