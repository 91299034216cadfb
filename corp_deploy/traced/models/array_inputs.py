"""Ports of a user's module: named input tensors of a shape and type that nothing prepares, and outputs in order."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from ground.errors import BadInput
from ground.ports import LOGITS, OutputPort, Port, Role

DTYPES = ("float32", "int64", "int32", "uint8", "bool")
WRITE = (
    "declare its `inputs`: for each parameter of forward the sizes after the batch, or one example as a tensor: "
    '{"pixels": (3, 224, 224), "ids": torch.zeros(128, dtype=torch.int64)}'
)


class InputSpec(Protocol):
    """The inputs of a model of any library: its ports, and the preparation of raw data for them."""

    medium: ClassVar[Literal["images", "text", "arrays"]]

    @property
    def ports(self) -> tuple[Port, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first port after the batch."""
        ...

    def as_line(self) -> str:
        """Describe the preparation in one line."""
        ...

    def as_json(self) -> dict[str, Any]:
        """Return the preparation as plain JSON values, in a fixed order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """The arrays that a module's forward takes without preparation, by the names of its parameters."""

    ports: tuple[Port, ...]
    medium: ClassVar[Literal["images", "text", "arrays"]] = "arrays"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ports[0].shape

    def as_line(self) -> str:
        return f"arrays as they are: {ports_as_line(self.ports)}"

    def as_json(self) -> dict[str, Any]:
        return {"inputs": [{"name": port.name, "shape": list(port.shape), "dtype": port.dtype} for port in self.ports]}


def ports_as_line(ports: Sequence[Port]) -> str:
    return ", ".join(f"{port.name} [{', '.join(map(str, port.shape))}] {port.dtype}" for port in ports)


def read_ports(model: nn.Module, declared: Mapping[Any, Any]) -> tuple[Port, ...]:
    """Return a module's declared ports; raise BadInput for what is no shape or tensor, or no parameter of forward."""
    name, parameters = type(model).__name__, parameters_of(model)
    missing = [each for each, needed in parameters.items() if needed and each not in declared]
    unknown = [each for each in declared if each not in parameters and "**" not in parameters]
    if missing or unknown:
        wrong = f"has no parameter {unknown[0]!r:.100}" if unknown else f"needs {missing[0]} too"
        names = ", ".join(each for each in parameters if each != "**")
        raise BadInput(f"{name}: `inputs` are {', '.join(map(str, declared))}, but forward({names}) {wrong}; {WRITE}")
    return tuple(_port(f"{name}: `inputs`: {each}", str(each), value) for each, value in declared.items())


def parameters_of(model: nn.Module) -> dict[str, bool]:
    """Return, by name of forward's parameters, whether each is required; a key `**` shows that it takes any others."""
    every = inspect.signature(model.forward).parameters.values()
    needless = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {each.name: each.default is each.empty for each in every if each.kind not in needless}
    return named | ({"**": False} if any(each.kind is each.VAR_KEYWORD for each in every) else {})


def takes_by_place(model: nn.Module, names: Sequence[str]) -> bool:
    """Check that forward's first parameters have these names and may be positional."""
    every = list(inspect.signature(model.forward).parameters.values())[: len(names)]
    return [each.name for each in every if each.kind is not each.KEYWORD_ONLY] == list(names)


def _port(where: str, name: str, value: Any) -> Port:
    shape, dtype = (value.shape, value.dtype) if isinstance(value, Tensor) else (value, torch.float32)
    sizes = tuple(shape) if isinstance(shape, list | tuple) else ()
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise BadInput(f"{where}: got {value!r:.100}, expected one size or more after the batch; {WRITE}")
    word = str(dtype).removeprefix("torch.")
    if word not in DTYPES:
        raise BadInput(f"{where}: a tensor of {word}, expected one of {', '.join(DTYPES)}")
    return Port(name=name, shape=sizes, dtype=word)


def build_plain_batch(ports: Sequence[Port], count: int, device: torch.device | str) -> list[Tensor]:
    """Build a tensor of zeros per port, [count, *shape]; masks are ones, so that all tokens count."""
    return [
        torch.full((count, *port.shape), int(is_mask(port)), dtype=getattr(torch, port.dtype), device=device)
        for port in ports
    ]


def build_random_batch(
    ports: Sequence[Port], sizes: Mapping[str, int], count: int, device: torch.device
) -> list[Tensor]:
    """Build a tensor per port: normal noise, ids below their vocabulary's size in `sizes`, or ones for other types."""
    generator = torch.Generator().manual_seed(0)

    def drawn(port: Port, plain: Tensor) -> Tensor:
        if is_mask(port) or port.dtype in ("bool", "uint8"):
            return torch.ones_like(plain)
        if port.dtype == "float32":
            return torch.randn(plain.shape, generator=generator)
        return torch.randint(sizes.get(port.name, 2), plain.shape, generator=generator, dtype=plain.dtype)

    plain = build_plain_batch(ports, count, "cpu")
    return [drawn(port, each).to(device) for port, each in zip(ports, plain, strict=True)]


def is_mask(port: Port) -> bool:
    """Check by its name whether a port takes the mask of real tokens."""
    return port.name.endswith("mask")


ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOrder:
    """Forward's `parameters` in the order of the ports, and the indices of the `outputs` among its result's tensors."""

    parameters: tuple[str, ...]
    outputs: tuple[int, ...]


def build_forward(plain: type[nn.Module], calling: CallOrder) -> Callable[..., Any]:
    """Build a forward that takes and gives tensors in the order of the ports, for a subclass of the module's class."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in ("self", *calling.parameters)])

    def forward(self: nn.Module, *inputs: Tensor, **named: Tensor) -> Any:
        arguments = list(signature.bind(self, *inputs, **named).arguments.values())[1:]
        result = plain.forward(self, **dict(zip(calling.parameters, arguments, strict=True)))
        tensors = [value for _, value in named_leaves(result)]
        outputs = tuple(tensors[place] for place in calling.outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward


def named_leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the names, joined by `_`, and leaves of nested tuples, lists, mappings and dataclasses; skip None."""
    if value is None:
        return
    inner = _entries(value)
    if inner is None:
        yield "_".join(path), value
        return
    for name, each in inner:
        yield from named_leaves(each, (*path, name))


def _entries(value: Any) -> list[tuple[str, Any]] | None:
    if isinstance(value, Mapping):
        return [(str(name), each) for name, each in value.items()]
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, list | tuple):
        names = getattr(value, "_fields", range(len(value)))  # a named tuple has _fields
        return [(str(name), each) for name, each in zip(names, value, strict=True)]
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenOutput:
    """One tensor of a module's result: its index among all, its port, and its shape with the batch in front."""

    place: int
    port: OutputPort
    shape: tuple[int, ...]


def read_outputs(model: nn.Module, result: Any, other: Any, batches: tuple[int, int]) -> tuple[GivenOutput, ...]:
    """Return the outputs that a module declares, else all; raise BadInput for one that is no floating batch."""
    first, second = (dict(enumerate(named_leaves(each))) for each in (result, other))
    declared, name = getattr(model, "outputs", None), type(model).__name__
    if isinstance(declared, list | tuple) and all(isinstance(each, str) for each in declared):
        declared = dict.fromkeys(declared)
    if not isinstance(declared, Mapping) or not declared:
        chosen: dict[int, tuple[str, Role | None]] = {
            place: (path or LOGITS.name, None) for place, (path, _) in first.items()
        }
    else:
        chosen = _declared(name, declared, [path for path, _ in first.values()])
    if not chosen:
        raise BadInput(f"{name}: forward returns nothing, expected one tensor or more")
    outputs = list[GivenOutput]()
    for place, (word, role) in chosen.items():
        word = f"output_{word}" if word[:1].isdigit() else word
        tensor, again = first[place][1], second.get(place, ("", None))[1]
        if refusal := _refusal(tensor, again, batches):
            same = isinstance(tensor, Tensor) and isinstance(again, Tensor) and tensor.shape == again.shape
            if same and tensor.is_floating_point() and tensor.dim():
                refusal += " (is a batch size written into its code, as in view or expand? take x.shape[0])"
            raise BadInput(
                f"{name}: its output {word} is {refusal}; expected floating tensors with the batch in front: declare "
                'only such tensors as `outputs`, for example {"logits": "logits"}'
            )
        port = OutputPort(name=word, role=role or role_of(word, tensor.dim()))
        outputs.append(GivenOutput(place=place, port=port, shape=tuple(tensor.shape)))
    return tuple(outputs)


def _declared(name: str, declared: Mapping[Any, Any], paths: Sequence[str]) -> dict[int, tuple[str, Role | None]]:
    if odd := [role for role in declared.values() if role not in (None, *ROLES)]:
        raise BadInput(f"{name}: `outputs` have the role {odd[0]!r:.50}, expected one of {', '.join(ROLES)}")
    if all(each in paths for each in declared):
        return {paths.index(each): (each, role) for each, role in declared.items()}
    if len(declared) != len(paths) or any(path and not path[0].isdigit() for path in paths):
        raise BadInput(
            f"{name}: `outputs` are {', '.join(map(str, declared))}, but it gives {', '.join(paths) or 'nothing'}; "
            "give these names, or as many names of your own, in order"
        )
    return {place: (str(each), role) for place, (each, role) in enumerate(declared.items())}


def _refusal(tensor: Any, again: Any, batches: tuple[int, int]) -> str:
    if not isinstance(tensor, Tensor) or not isinstance(again, Tensor):
        return f"a {type(tensor).__name__}"
    shapes = [list(each.shape) for each in (tensor, again)]
    if not tensor.is_floating_point() or any(not shape for shape in shapes):
        return f"{tensor.dtype} {shapes[0]}".removeprefix("torch.")
    if [shape[0] for shape in shapes] != list(batches) or shapes[0][1:] != shapes[1][1:]:
        return f"{shapes[0]} for a batch of {batches[0]} and {shapes[1]} for one of {batches[1]}"
    return ""


def role_of(name: str, rank: int) -> Role:
    """Guess an output's role by its name and its number of axes with the batch's."""
    if rank == 2 and any(word in name for word in ("embed", "pool", "feature")):
        return "embedding"
    if rank <= 2:
        return "logits"  # rank 1 is one logit an input
    named: dict[int, Role] = {3: "token logits", 4: "score map"}
    return named.get(rank, "feature map") if "logits" in name else "feature map"
