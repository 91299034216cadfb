"""Digests of calls: equal for equal calls in all processes, different where anything that decides the result differs.

Values count by their contents: tensors by type, layout and bytes, modules by class and attributes, fx graphs by their
nodes. The code of this project, of its tests and of classes made at run time counts by its bytecode and by everything
that it names, as it is in this process; a package's code counts by its name, for callers add the package's version.
Attributes that code only looks up by a computed name are not followed beyond the object that has them.
"""

import dis
import functools
import hashlib
import importlib
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    ClassMethodDescriptorType,
    CodeType,
    EllipsisType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    NoneType,
    NotImplementedType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

ROOMS = ("benchmarks", "calib", "corp_deploy", "examples", "export", "ground", "perf", "tests")
LIBRARIES = tuple(
    str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
OPERATORS = {"aten", "prim", "prims", "torchvision", "higher_order"}
"""Namespaces of operators whose code is torch's or torchvision's, and so is known by their versions."""
ATOMS = (
    NoneType, EllipsisType, NotImplementedType, bool, int, float, complex, str, bytes,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_DESCRIPTORS = (
    BuiltinFunctionType, ClassMethodDescriptorType, GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType,
    MethodWrapperType, WrapperDescriptorType,
)  # fmt: skip
# Where a node was written, which changes with every edit of a file and names the file.
_PROVENANCE = {"from_node", "seq_nr", "source_fn_stack", "stack_trace"}
# Of a class: what Python makes of the rest of it, and texts.
_DERIVED = {
    "__abstractmethods__", "__annotations__", "__dataclass_fields__", "__dataclass_params__", "__dict__", "__doc__",
    "__match_args__", "__module__", "__msgspec_cache__", "__orig_bases__", "__parameters__", "__weakref__", "_abc_impl",
}  # fmt: skip

_SIGNATURE = "_pt_onnx_signature"
"""An attribute that torch's exporter gives a translation at its first use, made of the function itself."""


class NotCacheable(Exception):
    """A value whose contents can't be digested; its text is the value's type."""


def digest(*values: object) -> str:
    """Return the digest of these values. Raises NotCacheable for a value whose contents can't be read completely."""
    contents = _Contents()
    for value in values:
        contents.add(value)
    return contents.hash.hexdigest()


class _Contents:
    """The hash of the values added so far; an object that comes again counts as the same object."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.numbers: dict[int, int] = {}
        self.alive: list[object] = []  # as long as an object lives, no other one has its id

    def write(self, *words: object) -> None:
        for word in words:
            data = word if isinstance(word, bytes) else str(word).encode("utf-8", "surrogatepass")
            self.hash.update(len(data).to_bytes(8, "big") + data)

    def add(self, value: Any) -> None:
        kind = type(value)
        if kind in ATOMS:
            self.write(kind.__name__, value if kind is bytes else repr(value))
        elif kind is tuple:
            self.sequence("tuple", value)
        elif id(value) in self.numbers:
            self.write("again", self.numbers[id(value)])
        else:
            self.numbers[id(value)] = len(self.numbers)
            self.alive.append(value)
            self.content(value)

    def sequence(self, name: str, values: Any) -> None:
        self.write(name, len(values))
        for each in values:
            self.add(each)

    def content(self, value: Any) -> None:
        match value:
            case torch.Tensor():
                self.tensor(value)
            case torch.jit.ScriptModule():
                raise NotCacheable(type(value).__name__)
            case nn.Module():
                self.write("module")
                self.add(type(value))
                self.add(_state(value))
            case fx.Graph():
                self.graph(value)
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                self.write(type(value).__name__, value)
            case torch._ops.OpOverload() | torch._ops.OpOverloadPacket() | torch._ops.HigherOrderOperator():
                self.operator(value)
            case type():
                self.type(value)
            case FunctionType():
                self.function(value)
            case MethodType():
                self.sequence("method", (value.__func__, value.__self__))
            case ModuleType():
                if not _is_library(value):
                    raise NotCacheable(f"module {value.__name__}")
                self.write("file", value.__name__)
            case CodeType():
                self.code(value)
            case re.Pattern():
                self.write("pattern", value.pattern, value.flags)
            case CellType():
                self.cell(value)
            case property():
                self.sequence("property", (value.fget, value.fset, value.fdel))
            case classmethod() | staticmethod():
                self.sequence(type(value).__name__, (value.__func__,))
            case functools.cached_property():
                self.sequence("cached property", (value.func,))
            case functools._lru_cache_wrapper():
                self.sequence("cached", (value.__wrapped__,))
            case MappingProxyType():
                self.items("mapping", value)
            case _ if type(value) is list:
                self.sequence("list", value)
            case _ if type(value) is dict:
                self.items("dict", value)
            case _ if type(value) in (set, frozenset):
                self.sequence(type(value).__name__, sorted(map(digest, value)))
            case _ if isinstance(value, _DESCRIPTORS):
                self.builtin(value)
            case _:
                self.reduced(value)

    def items(self, name: str, value: Mapping[Any, Any]) -> None:
        self.sequence(name, tuple(chain.from_iterable(value.items())))

    def tensor(self, value: torch.Tensor) -> None:
        """Add type, layout and bytes, and which tensors share one storage."""
        kind = type(value)
        if kind not in (torch.Tensor, nn.Parameter, FakeTensor) or value.layout is not torch.strided:
            raise NotCacheable(f"{kind.__name__} of layout {value.layout}")
        if value.is_quantized:
            raise NotCacheable(f"{kind.__name__} of type {value.dtype}")
        self.write(kind.__name__, value.dtype, value.device, tuple(value.shape), value.stride(), value.requires_grad)
        if kind is FakeTensor or value.is_meta:
            return
        storage = value.untyped_storage()
        self.alive.append(storage)
        self.write(self.numbers.setdefault(id(storage), len(self.numbers)), value.storage_offset())
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
        self.write(plain.view(torch.uint8).numpy().tobytes())
        self.add(vars(value))

    def graph(self, value: fx.Graph) -> None:
        nodes = list(value.nodes)
        self.write("graph", len(nodes))
        self.add(value._codegen)
        for node in nodes:
            self.numbers[id(node)] = len(self.numbers)
            self.write(node.op, node.name)
            told = {name: each for name, each in node.meta.items() if name not in _PROVENANCE}
            for each in (node.target, node.args, node.kwargs, told):
                self.add(each)

    def operator(self, value: Any) -> None:
        """Add a library's operator by its name; what an operator of the project does is written nowhere in it."""
        name = value.name() if isinstance(value, torch._ops.OpOverload) else str(value)
        space = value.namespace if isinstance(value, torch._ops.HigherOrderOperator) else name.partition("::")[0]
        if space.partition(".")[0] not in OPERATORS:
            raise NotCacheable(f"operator {name}")
        self.write("operator", name)

    def type(self, value: type) -> None:
        """Add a package's class by its name, any other one by its bases and everything in it."""
        self.write("type", value.__module__, value.__qualname__)
        if _is_of_library(value):
            return
        self.add(value.__bases__)
        self.items("class", {name: each for name, each in vars(value).items() if name not in _DERIVED})

    def function(self, value: FunctionType) -> None:
        """Add a package's function by its name, any other one by its code and everything that it reads."""
        self.write("function", value.__module__, value.__qualname__)
        if _is_of_library(value):
            return
        own = {name: each for name, each in vars(value).items() if name != _SIGNATURE}
        for each in (value.__code__, value.__closure__, value.__defaults__, value.__kwdefaults__, own):
            self.add(each)
        if not _is_from_library(value.__code__.co_filename):
            self.globals(value.__code__, value.__globals__)

    def globals(self, code: CodeType, known: Mapping[str, Any]) -> None:
        """Add what the names of the code stand for, of the project's modules all attributes that it may mean."""
        names, attributes, imported = _names(code)
        found = [(name, known[name]) for name in names if name in known]
        found += [(name, _imported(level, name, known)) for level, name in imported]
        modules = set[str]()
        for name, value in found:
            self.write(name)
            if not isinstance(value, ModuleType) or _is_library(value):
                self.add(value)
            elif value.__name__ not in modules:
                modules.add(value.__name__)
                found += [(each, vars(value)[each]) for each in attributes if each in vars(value)]

    def code(self, value: CodeType) -> None:
        self.write("code", value.co_code, value.co_flags, value.co_argcount, value.co_posonlyargcount)
        self.write(value.co_kwonlyargcount, value.co_exceptiontable)
        for each in (value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars, value.co_consts):
            self.add(each)

    def cell(self, value: CellType) -> None:
        try:
            content = value.cell_contents
        except ValueError:
            self.write("empty cell")
        else:
            self.sequence("cell", (content,))

    def builtin(self, value: Any) -> None:
        self.write("builtin", type(value).__name__, value.__qualname__)
        owner = getattr(value, "__self__", None)
        if owner is not None:
            self.add(owner)

    def reduced(self, value: object) -> None:
        """Add what pickle and copy take an object for: how it is made and its state."""
        try:
            made = value.__reduce_ex__(4)
        except Exception as error:
            raise NotCacheable(type(value).__name__) from error
        if isinstance(made, str):
            self.write("global", type(value).__module__, type(value).__qualname__, made)
            return
        make, arguments, state, items, pairs, *_ = (*made, None, None, None, None)
        parts: tuple[Any, ...] = (make, arguments, state, list(items or ()), list(pairs or ()))
        self.sequence("object", parts)


def _state(module: nn.Module) -> dict[str, Any]:
    """A module's attributes, its hooks numbered from 0: a process counts all hooks that it has made."""
    hooks = {name: held for name, held in vars(module).items() if "hooks" in name and isinstance(held, dict)}
    numbers = {number: place for place, number in enumerate(sorted(set(chain.from_iterable(hooks.values()))))}
    return vars(module) | {
        name: {numbers[number]: hook for number, hook in held.items()} for name, held in hooks.items()
    }


def _is_of_library(value: Any) -> bool:
    """Return whether an installed package, or Python, has this class or function under its name."""
    module = sys.modules.get(value.__module__ or "")
    if module is None or not _is_library(module):
        return False
    found: Any = module
    for name in value.__qualname__.split("."):
        found = vars(found).get(name) if isinstance(found, type | ModuleType) else None
    return found is value or (isinstance(found, classmethod | staticmethod) and found.__func__ is value)


def _is_library(module: ModuleType) -> bool:
    top = module.__name__.partition(".")[0]
    path = getattr(module, "__file__", None) or getattr(sys.modules.get(top), "__file__", None)
    return _is_from_library(path) if path else top in sys.stdlib_module_names


@functools.cache
def _is_from_library(path: str) -> bool:
    """Return whether a version identifies this file's code: Python's or a package's, but not this project's."""
    if path.startswith("<frozen "):
        return True
    place = next((place for place in LIBRARIES if Path(path).is_relative_to(place)), None)
    return place is not None and not {*Path(path).relative_to(place).parts[:2]} & {*ROOMS}


@functools.cache
def _names(code: CodeType) -> tuple[list[str], list[str], list[tuple[int, str]]]:
    """The globals that code and the functions in it read, the attributes, and the imports with their levels."""
    names, attributes, imported = dict[str, None](), dict[str, None](), list[tuple[int, str]]()
    for each in _nested(code):
        before: list[Any] = []
        for step in dis.get_instructions(each):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names[step.argval] = None
            elif step.opname == "IMPORT_NAME":
                imported.append((before[-2], step.argval))
            elif before[-1:] == ["ops"] and step.argval in each.co_names and step.argval not in OPERATORS:
                raise NotCacheable(f"operator {step.argval}")  # nothing that can be read says what it does
            before.append(step.argval)
        attributes |= dict.fromkeys(each.co_names)
    return list(names), list(attributes), imported


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _nested(each)


def _imported(level: int, name: str, known: Mapping[str, Any]) -> ModuleType | None:
    """The module that an import within a function means; None for a package's, whose version is known."""
    name = importlib.util.resolve_name("." * level + name, known["__package__"]) if level else name
    return importlib.import_module(name) if name.partition(".")[0] in ROOMS else None
