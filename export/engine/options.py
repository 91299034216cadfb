"""What a build may be asked for, what each backend refuses with its reason, and the one seam to TensorRT and
TensorRT-RTX: which bindings a build runs on.

Both libraries export the same object model (Builder, OnnxParser, IBuilderConfig, ...), so the seam is the bindings
module itself, opened here and passed on. polygraphy is not in between, for three reasons: it picks one of the two
libraries for the whole process by an environment variable read at import; it sends the builder's log, which is where
TensorRT-RTX lists its kernels, to a global logger; and its parser errors lose the node that they belong to.
"""

import importlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
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


LARGEST_BATCH = 65_536
_PROFILE = re.compile(r"[0-9]{1,9}(?::[0-9]{1,9}:[0-9]{1,9})?")
RTX_TARGETS = ("75", "80", "86", "89", "120", "121", "portable")
BACKENDS = ("tensorrt", "tensorrt-rtx")
# What hardware a plan is meant for beyond the one it is built on or for, by backend.
COMPATIBILITIES = {"tensorrt": ("ampere-plus", "same-compute-capability"), "tensorrt-rtx": ("portable", "targets")}
# What a portable plan of TensorRT-RTX runs on, and could have been built for alone.
PORTABLE_TARGETS = ("80", "86", "89", "120")
# What a backend can't honour, with its reason.
REFUSALS = {
    "tensorrt": {"sms": "TensorRT builds for the GPU it runs on"},
    "tensorrt-rtx": {
        "timing_cache": "TensorRT-RTX picks kernels on the target machine and has no timing cache",
        "optimization_level": "TensorRT-RTX builds the same plan at every level",
        "version_compatible": "TensorRT-RTX plans run only with the version that built them; rebuild for each version",
        "sparse": "TensorRT-RTX builds the same plan with and without it, byte for byte",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProfile:
    """One optimisation profile: the smallest, the tuned and the largest batch."""

    smallest: int
    tuned: int
    largest: int

    def __post_init__(self) -> None:
        if not 1 <= self.smallest <= self.tuned <= self.largest <= LARGEST_BATCH:
            raise BadInput(f"a batch profile needs 1 <= min <= opt <= max <= {LARGEST_BATCH}, got {self}")

    def __str__(self) -> str:
        return f"{self.smallest}:{self.tuned}:{self.largest}"

    @staticmethod
    def from_text(text: str) -> "BatchProfile":
        """'1:8:64', or '8' for one fixed size."""
        if not _PROFILE.fullmatch(text):
            raise BadInput(f"batch {text[:100]!r} is not MIN:OPT:MAX, such as 1:8:64, nor one number")
        parts = text.split(":")
        sizes = [int(part) for part in parts] * (3 // len(parts))
        return BatchProfile(smallest=sizes[0], tuned=sizes[1], largest=sizes[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Everything that decides a plan beside the graph.

    `precision` is what the caller calls the graph (None: its own label). `sms` names TensorRT-RTX targets; none means
    portable, which runs on Ampere and newer. `compatibility` is one of COMPATIBILITIES, None the hardware at hand or
    that of `sms`. `optimization_level` is 0 to 5. `command` is kept in the record and told
    when this machine can't build.
    """

    backend: str
    precision: str | None = None
    profiles: tuple[BatchProfile, ...] = ()
    sms: tuple[str, ...] = ()
    timing_cache: Path | None = None
    optimization_level: int | None = None
    workspace_bytes: int | None = None
    version_compatible: bool = False
    sparse: bool = False
    compatibility: str | None = None
    command: str = ""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise BadInput(f"backend {self.backend!r} is unknown; choose {' or '.join(BACKENDS)}")
        if self.workspace_bytes is not None and self.workspace_bytes < 1:
            raise BadInput(f"the workspace limit must be at least 1 byte, got {self.workspace_bytes}")
        if self.optimization_level is not None and not 0 <= self.optimization_level <= 5:
            raise BadInput(f"the optimization level lies between 0 and 5, got {self.optimization_level}")
        for name, reason in REFUSALS[self.backend].items():
            if getattr(self, name) not in (None, False, ()):
                other = BACKENDS[1 - BACKENDS.index(self.backend)]
                raise BadInput(f"{name.replace('_', ' ')}: {reason}; leave it out or use the backend {other}")
        self._require_targets()
        self._require_compatibility()

    @property
    def exact(self) -> "dict[str, BuildOptions]":
        """What a compatible plan is priced against, by target: the same without compatibility, for one GPU each."""
        alone = replace(self, compatibility=None, version_compatible=False)
        if self.compatibility is None:
            return {}
        if self.backend == "tensorrt":
            return {"exact": alone}
        targets = self.sms if self.compatibility == "targets" else PORTABLE_TARGETS
        return {f"sm{sm}": replace(alone, sms=(sm,)) for sm in targets}

    def _require_compatibility(self) -> None:
        levels = COMPATIBILITIES[self.backend]
        if self.compatibility is None:
            return
        if self.compatibility not in levels:
            raise BadInput(
                f"compatibility {self.compatibility!r} is none of {self.backend}; choose {' or '.join(levels)}"
            )
        if self.compatibility == "portable" and self.sms:
            raise BadInput(
                f"compatibility portable runs on every target from SM80 on, and --sm asks for {', '.join(self.sms)}; "
                "leave --sm out, or choose compatibility targets"
            )
        if self.compatibility == "targets" and len(self.sms) < 2:
            raise BadInput("compatibility targets needs two targets or more, such as --sm 86 --sm 89")

    def _require_targets(self) -> None:
        unknown = [sm for sm in self.sms if sm not in RTX_TARGETS]
        if unknown:
            raise BadInput(f"--sm {unknown[0]!r} is no target of TensorRT-RTX; choose from {', '.join(RTX_TARGETS)}")
        if len(set(self.sms)) < len(self.sms) or ("portable" in self.sms and len(self.sms) > 1):
            raise BadInput(f"--sm takes each target once, and portable alone, got {' '.join(self.sms)}")
