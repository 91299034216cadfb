"""A recorder of the ATen calls that a model makes on meta tensors, in order."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .sizes import BatchDependentProgram, MetaCalls, alike, sizes_key


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a tensor: a call's number and the index among its results, or the name of an input or weight."""

    source: int | str
    place: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """A recorded call of an op, with the op's result in `gives`.

    `args`: the positional and the named arguments, with a Ref for each tensor. `stack`: the path and the class of every
    module that the call was made in, outermost first.
    """

    target: Any
    args: Any
    gives: Any
    stack: tuple[tuple[str, str], ...]


_SCATTERS = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
}
_CALLS = MetaCalls()


class Recorder(SchemaCheckMode):
    """A dispatch mode that records calls before autograd and before decompositions, as torch.export does."""

    def __init__(self, named: Mapping[str, Tensor], stack: list[tuple[str, str]], *, on_meta: bool) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self.calls: list[RecordedCall] = []
        self.constants: dict[str, Tensor] = {}
        self._stack, self._on_meta = stack, on_meta
        self._refs: dict[int, _Known] = {}
        self._by_place: dict[Any, _Known] = {}
        self._changes: Counter[int] = Counter()
        self._parts: dict[int, tuple[Tensor, Any, Any]] = {}
        self._alive: list[Tensor] = []
        for name, tensor in named.items():
            self._know(tensor, Ref(name))
        self._storages = set(map(_storage, named.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        entering = args, kwargs or {}
        if func is torch.ops.aten.detach_.default:
            return args[0]
        written, tensors = _mapped(entering, self.ref), list[Tensor]()
        _mapped(entering, tensors.append)
        if any(each.is_meta for each in tensors):
            entering = _mapped(entering, lambda each: each.to("meta"))
            is_itself = func._schema.name.endswith("_") and torch.Tag.pointwise in func.tags  # such as relu_
            gives = args[0] if is_itself else self._run_on_meta(func, entering, tensors)
        else:
            gives = func(*entering[0], **entering[1])
        wholes = list(self._wholes(args[0])) if func._schema.is_mutable else []
        if func._schema.is_mutable:  # from here on, other views of the same storage are stale
            if _storage(args[0]) in self._storages:
                raise BatchDependentProgram("an input, parameter or constant is changed in place")
            self._changes[_storage(args[0])] += 1
        self._write(func, written, gives)
        if func in _SCATTERS:
            self._parts[id(gives)] = args[0], _SCATTERS[func], args[1:]
        for scatter, base, ref, place in wholes:
            self._write(scatter, ((ref, Ref(len(self.calls) - 1), *place), {}), base)
        return gives

    def _write(self, func: Any, written: Any, gives: Any) -> None:
        several = isinstance(gives, list | tuple)
        for place, each in enumerate(gives if several else (gives,)):
            if isinstance(each, Tensor):
                self._know(each, Ref(len(self.calls), place if several else None))
        self.calls.append(RecordedCall(target=func, args=written, gives=gives, stack=tuple(self._stack)))

    def _wholes(self, part: Tensor) -> Iterator[tuple[Any, Tensor, Ref, Any]]:
        """Yield op, tensor, Ref and arguments to scatter a view into each tensor that contains it, innermost first."""
        while id(part) in self._parts:
            base, scatter, place = self._parts[id(part)]
            yield scatter, base, self.ref(base), place
            part = base

    def _run_on_meta(self, func: Any, entering: Any, tensors: Sequence[Tensor]) -> Any:
        """Run an op on meta tensors, once for equal sizes unless it gives views or changes its input."""
        key = func, sizes_key(entering)
        known = _CALLS.get(key)
        if known is None:
            with torch._C._DisablePythonDispatcher():  # most ops have faster meta kernels in C++
                gives = func(*entering[0], **entering[1])
            before, own = set(map(_storage, tensors)), list[Tensor]()
            _mapped(gives, own.append)
            if own and not before.intersection(map(_storage, own)) and not func._schema.is_mutable:
                _CALLS.put(key, _mapped(gives, alike))  # a model may go on to change the shape of what it has
            return gives
        return _mapped(known, alike)

    def _know(self, tensor: Tensor, ref: Ref) -> None:
        record = _Known(ref, self._changes[_storage(tensor)])
        self._refs[id(tensor)] = self._by_place[_place(tensor)] = record
        self._alive.append(tensor)

    def ref(self, tensor: Tensor) -> Ref:
        """Return a known tensor's reference, or that of a view with equal layout; record any other as a constant.

        Raises BatchDependentProgram for a stale view and for a meta tensor that no recorded call gave.
        """
        record = self._refs.get(id(tensor)) or self._by_place.get(_place(tensor))
        if record is not None and record.changes < self._changes[_storage(tensor)]:
            record = self._by_place[_place(tensor)]
            if record.changes < self._changes[_storage(tensor)]:
                raise BatchDependentProgram("a view of a tensor that was changed in place")
        if record is None:
            if tensor.is_meta and not self._on_meta:
                raise BatchDependentProgram("a meta tensor that no recorded call gave")
            record = _Known(Ref(f"constant_{len(self.constants)}"), 0)
            self.constants[str(record.ref.source)] = tensor
            self._storages.add(_storage(tensor))
        self._know(tensor, record.ref)
        return record.ref


@dataclass(frozen=True, slots=True)
class _Known:
    """A tensor's reference, and how often its storage had been changed in place when a call gave it."""

    ref: Ref
    changes: int


def _mapped(value: Any, what: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return what(value)
    if isinstance(value, list | tuple):
        return type(value)([_mapped(each, what) for each in value])
    return {name: _mapped(each, what) for name, each in value.items()} if isinstance(value, dict) else value


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _place(tensor: Tensor) -> Any:
    return (_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


class KeepNumbersOffMeta(TorchFunctionMode):
    """A function mode in which torch.tensor and its like ignore `device`: on meta, the numbers would be lost."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and not isinstance(args[0], Tensor):
            kwargs.pop("device", None)
        elif func is Tensor.new_tensor:
            func, args, kwargs = torch.tensor, args[1:], {"dtype": args[0].dtype} | kwargs
            kwargs.pop("device", None)
        return func(*args, **kwargs)
