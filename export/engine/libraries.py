"""The one seam to TensorRT and TensorRT-RTX: which bindings a build runs on.

Both libraries export the same object model (Builder, OnnxParser, IBuilderConfig, ...), so the seam is the bindings
module itself, opened here and passed on. polygraphy is not in between, for three reasons: it picks one of the two
libraries for the whole process by an environment variable read at import; it sends the builder's log, which is where
TensorRT-RTX lists its kernels, to a global logger; and its parser errors lose the node that they belong to.
"""

import importlib
from dataclasses import dataclass
from typing import Any

from onnx import ModelProto, TensorProto

from ground.errors import BadInput, Missing
from ground.vulnerabilities import version_numbers

_MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
# TensorRT 11 is recommended, 10.16.1 the first of 10 with its published fixes, for servers that have 10; TensorRT-RTX
# builds portable engines without a GPU from 1.2 on.
_OLDEST = {"tensorrt": (10, 16, 1), "tensorrt-rtx": (1, 2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """Opened bindings; `module` is what `import tensorrt` gives, or a stand-in with the same names."""

    name: str
    version: str
    module: Any

    def __post_init__(self) -> None:
        assert self.name in _MODULES, self.name

    @property
    def is_rtx(self) -> bool:
        return self.name == "tensorrt-rtx"


def open_library(name: str, *, command: str = "") -> Library:
    """The bindings of `tensorrt` or `tensorrt-rtx`; Missing when absent or too old, with `command` to run elsewhere."""
    if name not in _MODULES:
        raise BadInput(f"backend {name!r} is unknown; choose one of {', '.join(_MODULES)}")
    try:
        module = importlib.import_module(_MODULES[name])
    except (ImportError, OSError) as error:
        raise Missing(missing_message(name, f"its Python package can't be loaded ({error})", command)) from error
    version = str(module.__version__)
    oldest = _OLDEST[name]
    if version_numbers(version) < oldest:
        needed = ".".join(map(str, oldest))
        raise Missing(missing_message(name, f"version {needed} or newer is needed, {version} is installed", command))
    return Library(name=name, version=version, module=module)


def missing_message(backend: str, what: str, command: str, install: str = "") -> str:
    """One message: what is missing, the command that installs it, the command line to run on another machine."""
    lines = [f"{backend} can't build here: {what}"]
    lines.append(f"  install: {install or f'pip install --upgrade {backend}'}")
    if command:
        lines.append(f"  or run on a machine that has it: {command}")
    return "\n".join(lines)


# 1.5.0.114 and 1.6.1.120 fail a check of types in each of them, for every GPU; 1.7.1.116 builds them.
_RTX_WITH_INT8_CONVOLUTIONS = (1, 7)


def int8_convolutions(proto: ModelProto) -> list[str]:
    """Modules whose convolution reads an INT8 weight, in the graph's order."""
    small = {tensor.name for tensor in proto.graph.initializer if tensor.data_type == TensorProto.INT8}
    read = {
        node.output[0] for node in proto.graph.node if node.op_type == "DequantizeLinear" and node.input[0] in small
    }
    return [
        node.name.rpartition("/")[0] for node in proto.graph.node if node.op_type == "Conv" and node.input[1] in read
    ]


def remedies(library: Library, proto: ModelProto) -> list[str]:
    """What to do about what this version can't build in the graph."""
    if not library.is_rtx or version_numbers(library.version) >= _RTX_WITH_INT8_CONVOLUTIONS:
        return []
    modules = int8_convolutions(proto)
    if not modules:
        return []
    kept = " ".join(f"--keep-rest {module}" for module in modules) if len(modules) <= 3 else "--precision fp16"
    return [f"before 1.7 it builds no convolution in INT8: export with {kept}, or build with tensorrt-rtx 1.7"]
