"""How a module is called by its ports: each handed over by the name of a parameter, its outputs as tensors in order."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_args

from torch import Tensor, nn

from ground.errors import BadInput
from ground.ports import LOGITS, OutputPort, Role

ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calling:
    """`parameters` of forward, in the order of the input ports; `outputs`: the places of the output ports among all
    that the module gives, nested or not.
    """

    parameters: tuple[str, ...]
    outputs: tuple[int, ...]

    def called(self, forward: Callable[..., Any], inputs: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
        """The outputs, one of them bare."""
        tensors = [value for _, value in leaves(forward(**dict(zip(self.parameters, inputs, strict=True))))]
        outputs = tuple(tensors[place] for place in self.outputs)
        return outputs[0] if len(outputs) == 1 else outputs


def by_ports(plain: type[nn.Module], calling: Calling) -> Callable[..., Any]:
    """A forward of these parameters, in this order, for a class that is derived from the module's own."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in ("self", *calling.parameters)])

    def forward(self: nn.Module, *inputs: Tensor, **named: Tensor) -> Any:
        arguments = signature.bind(self, *inputs, **named).arguments
        return calling.called(lambda **each: plain.forward(self, **each), list(arguments.values())[1:])

    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """What stands in a tuple, list, mapping or dataclass, and in those inside it, by name; nothing of None."""
    if value is None:
        return
    inner = _entries(value)
    if inner is None:
        yield "_".join(path), value
        return
    for name, each in inner:
        yield from leaves(each, (*path, name))


def _entries(value: Any) -> list[tuple[str, Any]] | None:
    """Of what holds others, those with their names."""
    if isinstance(value, Mapping):
        return [(str(name), each) for name, each in value.items()]
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, list | tuple):
        names = getattr(value, "_fields", range(len(value)))  # of a named tuple
        return [(str(name), each) for name, each in zip(names, value, strict=True)]
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One of the tensors that a module gives: its place among them, its port, and its shape with a batch in front."""

    place: int
    port: OutputPort
    shape: tuple[int, ...]


def outputs_of(model: nn.Module, result: Any, other: Any, batches: tuple[int, int]) -> tuple[Output, ...]:
    """Of what a module gives to batches of these two sizes those that it says, as `outputs` (names, or roles by name),
    else all. Raises BadInput for what is no floating tensor with the batch in front.
    """
    first, second = (dict(enumerate(leaves(each))) for each in (result, other))
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
        raise BadInput(f"{name}: it gives nothing, expected one tensor or more")
    outputs = list[Output]()
    for place, (word, role) in chosen.items():
        word = f"output_{word}" if word[:1].isdigit() else word
        tensor, again = first[place][1], second.get(place, ("", None))[1]
        if refusal := _refusal(tensor, again, batches):
            raise BadInput(
                f"{name}: its output {word} is {refusal}; expected floating tensors with the batch in front: let it "
                'say the others as `outputs`, such as {"logits": "logits"}'
            )
        port = OutputPort(name=word, role=role or role_of(word, tensor.dim()))
        outputs.append(Output(place=place, port=port, shape=tuple(tensor.shape)))
    return tuple(outputs)


def _declared(name: str, declared: Mapping[Any, Any], paths: Sequence[str]) -> dict[int, tuple[str, Role | None]]:
    """By place the name that a module says, and a role or none: by the names that it gives them, or in their order."""
    if odd := [role for role in declared.values() if role not in (None, *ROLES)]:
        raise BadInput(f"{name}: `outputs` say {odd[0]!r:.50}, expected one of {', '.join(ROLES)}")
    if all(each in paths for each in declared):
        return {paths.index(each): (each, role) for each, role in declared.items()}
    if len(declared) != len(paths) or any(path and not path[0].isdigit() for path in paths):
        raise BadInput(
            f"{name}: `outputs` are {', '.join(map(str, declared))}, but it gives {', '.join(paths) or 'nothing'}; "
            "name those, or as many as there are in their order"
        )
    return {place: (str(each), role) for place, (each, role) in enumerate(declared.items())}


def _refusal(tensor: Any, again: Any, batches: tuple[int, int]) -> str:
    """Why this can't be an output, or nothing."""
    if not isinstance(tensor, Tensor) or not isinstance(again, Tensor):
        return f"a {type(tensor).__name__}"
    shapes = [list(each.shape) for each in (tensor, again)]
    if not tensor.is_floating_point() or any(not shape for shape in shapes):
        return f"{tensor.dtype} {shapes[0]}".removeprefix("torch.")
    if [shape[0] for shape in shapes] != list(batches) or shapes[0][1:] != shapes[1][1:]:
        return f"{shapes[0]} for a batch of {batches[0]} and {shapes[1]} for one of {batches[1]}"
    return ""


def role_of(name: str, rank: int) -> Role:
    """What an output is for, by its name and how many axes it has with the batch's."""
    if rank == 2 and any(word in name for word in ("embed", "pool", "feature")):
        return "embedding"
    if rank == 2:
        return "logits"
    named: dict[int, Role] = {3: "token logits", 4: "score map"}
    return named.get(rank, "feature map") if "logits" in name else "feature map"
