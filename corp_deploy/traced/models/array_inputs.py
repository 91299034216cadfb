"""Tensors as a module takes them that nothing here prepares, each by a name, of a shape and a type."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from ground.errors import BadInput
from ground.ports import Port

DTYPES = ("float32", "int64", "int32", "uint8", "bool")
WRITE = (
    "let it say `inputs`, for each parameter of forward the sizes behind the batch, or one of it as a tensor: "
    '{"pixels": (3, 224, 224), "ids": torch.zeros(128, dtype=torch.int64)}'
)


class InputSpec(Protocol):
    """What a model takes, whatever library built it: its ports, and how raw data becomes them."""

    medium: ClassVar[Literal["images", "text", "arrays"]]

    @property
    def ports(self) -> tuple[Port, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first port, behind the batch."""
        ...

    def as_line(self) -> str:
        """The preparation for people."""
        ...

    def as_json(self) -> dict[str, Any]:
        """The preparation as plain JSON values, in one order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """What a module takes, by the names of its parameters."""

    ports: tuple[Port, ...]
    medium: ClassVar[Literal["images", "text", "arrays"]] = "arrays"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ports[0].shape

    def as_line(self) -> str:
        """The inputs for people."""
        return f"arrays as they are: {listed(self.ports)}"

    def as_json(self) -> dict[str, Any]:
        """The inputs as plain JSON values."""
        return {"inputs": [{"name": port.name, "shape": list(port.shape), "dtype": port.dtype} for port in self.ports]}


def listed(ports: Sequence[Port]) -> str:
    return ", ".join(f"{port.name} [{', '.join(map(str, port.shape))}] {port.dtype}" for port in ports)


def declared_ports(model: nn.Module) -> tuple[Port, ...] | None:
    """What a module says that it takes, as `inputs`; None where it says nothing. Raises BadInput for what is no shape
    and no tensor, and for what forward has not.
    """
    declared = getattr(model, "inputs", None)
    return ports_of(model, declared) if isinstance(declared, Mapping) and declared else None


def ports_of(model: nn.Module, declared: Mapping[Any, Any]) -> tuple[Port, ...]:
    """What a module takes by these. Raises BadInput as declared_ports does."""
    name, parameters = type(model).__name__, parameters_of(model)
    missing = [each for each, needed in parameters.items() if needed and each not in declared]
    unknown = [each for each in declared if each not in parameters and "**" not in parameters]
    if missing or unknown:
        wrong = f"has no parameter {unknown[0]!r:.100}" if unknown else f"needs {missing[0]} too"
        names = ", ".join(each for each in parameters if each != "**")
        raise BadInput(f"{name}: `inputs` are {', '.join(map(str, declared))}, but forward({names}) {wrong}; {WRITE}")
    return tuple(_port(f"{name}: `inputs`: {each}", str(each), value) for each, value in declared.items())


def parameters_of(model: nn.Module) -> dict[str, bool]:
    """Forward's parameters by name, whether each is needed; `**` where it takes any others."""
    every = inspect.signature(model.forward).parameters.values()
    needless = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {each.name: each.default is each.empty for each in every if each.kind not in needless}
    return named | ({"**": False} if any(each.kind is each.VAR_KEYWORD for each in every) else {})


def takes_by_place(model: nn.Module, names: Sequence[str]) -> bool:
    """Whether forward's first parameters are these and may be given without their names."""
    every = list(inspect.signature(model.forward).parameters.values())[: len(names)]
    return [each.name for each in every if each.kind is not each.KEYWORD_ONLY] == list(names)


def _port(where: str, name: str, value: Any) -> Port:
    shape, dtype = (value.shape, value.dtype) if isinstance(value, Tensor) else (value, torch.float32)
    sizes = tuple(shape) if isinstance(shape, list | tuple) else ()
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise BadInput(f"{where}: got {value!r:.100}, expected one size or more behind the batch; {WRITE}")
    word = str(dtype).removeprefix("torch.")
    if word not in DTYPES:
        raise BadInput(f"{where}: a tensor of {word}, expected one of {', '.join(DTYPES)}")
    return Port(name=name, shape=sizes, dtype=word)


def batch_of_ports(ports: Sequence[Port], count: int, device: torch.device | str) -> list[Tensor]:
    """Zeros, and ones of masks, so that something is there."""
    return [
        torch.full((count, *port.shape), int(is_mask(port)), dtype=getattr(torch, port.dtype), device=device)
        for port in ports
    ]


def random_batch(ports: Sequence[Port], sizes: Mapping[str, int], count: int, device: torch.device) -> list[Tensor]:
    """Normal noise, ids below as many as are `sizes`, and ones of masks and of what else no noise can be of."""
    generator = torch.Generator().manual_seed(0)

    def drawn(port: Port, plain: Tensor) -> Tensor:
        if is_mask(port) or port.dtype in ("bool", "uint8"):
            return torch.ones_like(plain)
        if port.dtype == "float32":
            return torch.randn(plain.shape, generator=generator)
        return torch.randint(sizes.get(port.name, 2), plain.shape, generator=generator, dtype=plain.dtype)

    plain = batch_of_ports(ports, count, "cpu")
    return [drawn(port, each).to(device) for port, each in zip(ports, plain, strict=True)]


def is_mask(port: Port) -> bool:
    """Whether it says which tokens are there."""
    return port.name.endswith("mask")
