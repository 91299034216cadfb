"""A device that is not the CPU, for machines without a GPU: it computes on the CPU and refuses what a GPU would refuse.

A tensor there holds one of the CPU. Every operation of tensors of both places is refused, but for copies, for numbers
(tensors without axes) and for indices, which a GPU takes from the CPU too; so is a generator of the CPU for values
there, and giving a tensor to NumPy. Whatever asks whether a device is the CPU is told no.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretended"
_ATEN = torch.ops.aten
_COPIES = {_ATEN._to_copy.default, _ATEN.copy_.default, _ATEN.copy.default}
# Of these the tensor itself and, where there are any, the values have to be in one place.
_INDEXED = {_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default}


class Elsewhere(Tensor):
    """A tensor there."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Elsewhere":
        # Views of what was made outside of inference mode are no inference tensors, and these are never to be.
        with torch.inference_mode(False):
            made: Elsewhere = Tensor._make_wrapper_subclass(
                cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
                device=torch.device(NAME, 0),
            )  # fmt: skip
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"a tensor on {NAME} can't become an array; copy it to the CPU first")

    def __array__(self, *given: Any, **named: Any) -> Any:
        return self.numpy()

    def __repr__(self, **named: Any) -> str:  # type: ignore[override]
        return f"{self.held!r} on {NAME}"


def _refuse_both(func: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    """Raise RuntimeError for tensors of both places."""
    asked = tensors
    if func in _INDEXED:
        asked = [each for each in (args[0], *args[2:3]) if isinstance(each, Tensor)]
        if not isinstance(args[0], Elsewhere) and any(isinstance(each, Elsewhere) for each in tensors):
            raise RuntimeError(f"{func}: indices on {NAME} of a tensor on the CPU")
    if any(isinstance(each, Elsewhere) for each in asked):
        wrong = [tuple(each.shape) for each in asked if not isinstance(each, Elsewhere) and each.dim() > 0]
        if wrong:
            raise RuntimeError(f"{func}: tensors on {NAME} and, of shapes {wrong}, on the CPU")


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """The tensor that was given to be written into, where the operation gives that back; else None."""
    if not func._schema.is_mutable or not isinstance(out, Tensor):
        return None
    if "out" in kwargs:
        return kwargs["out"]
    first = func._schema.arguments[0].alias_info
    return args[0] if first is not None and first.is_write else None


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = [each for each in tensors if isinstance(each, Elsewhere)]
    asked = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    if func not in _COPIES:
        _refuse_both(func, args, tensors)
    stays = bool(there) if asked is None else asked.type == NAME
    if stays and kwargs.get("generator") is not None:
        raise RuntimeError(f"{func}: a generator of the CPU for values on {NAME}")
    own_args, own_kwargs = tree.tree_map_only(Elsewhere, lambda each: each.held, (args, kwargs))
    if asked is not None and asked.type == NAME:
        own_kwargs = {**own_kwargs, "device": torch.device("cpu"), "pin_memory": False}
        own_kwargs = {key: value for key, value in own_kwargs.items() if key in _names(func)}
    out = func(*own_args, **own_kwargs)
    if (written := _written(func, args, kwargs, out)) is not None:
        return written
    if not stays:
        return out
    return tree.tree_map_only(Tensor, lambda each: each if isinstance(each, Elsewhere) else Elsewhere(each), out)


@cache
def _names(func: Any) -> frozenset[str]:
    return frozenset(argument.name for argument in func._schema.arguments)


class _Running(TorchDispatchMode):
    """What has no tensor there yet: tensors that are made there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Making(TorchFunctionMode):
    """Tensors of Python's numbers, which torch makes without asking a dispatch mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and named.get("device") is not None:
            device = torch.device(named["device"])
            if device.type == NAME:
                return func(*args, **{**named, "device": None}).to(device)
        if func is Tensor.new_tensor and isinstance(args[0], Elsewhere):
            return torch.tensor(args[1], **{"dtype": args[0].dtype, **named}).to(args[0].device)
        return func(*args, **named)


class _Module:
    """What torch asks the module of a device."""

    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    is_autocast_enabled = staticmethod(lambda: False)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    get_rng_state = staticmethod(lambda device: torch.empty(0, dtype=torch.uint8))
    set_rng_state: Callable[[torch.Tensor, int], None] = staticmethod(lambda state, device: None)
    manual_seed_all: Callable[[int], None] = staticmethod(lambda seed: None)
    _is_in_bad_fork = staticmethod(lambda: False)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


@cache
def _register() -> None:
    """Once a process, for good."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())


@contextmanager
def pretended() -> Iterator[str]:
    """The device's name, to be used within this context."""
    _register()
    with _Making(), _Running():  # type: ignore[no-untyped-call]
        yield NAME
