"""Options of `build` and `audit`. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from export.engine.options import BatchProfile, BuildOptions
from ground.precision import EVERY_WORD
from ground.quantity import OPTIMIZATION_LEVEL, WORKSPACE_MIB

from .option import PathLike, Record, option
from .table import AUDIT, BUILD, ENGINE_OPTIONS
from .values import FILE, OneOf, ParsedText, Repeated

PROFILE = ParsedText(span="min:opt:max", expected="MIN:OPT:MAX", kind=BatchProfile, read=BatchProfile.from_text)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Record, heading="Engine"):
    """Of what is None the builder decides. An option that what builds would ignore is refused, see BUILD."""

    backend: Literal["tensorrt", "tensorrt-rtx", "onnxruntime"] = option(
        default="tensorrt", help="What builds it; TensorRT-RTX and ONNX Runtime need no GPU."
    )
    batch: Sequence[BatchProfile] = option(
        Repeated(each=PROFILE),
        (),
        help=f"A profile min:opt:max, such as 1:8:64; may be given several times. {BUILD.help('batch')}",
    )
    sm: Sequence[str] = option(
        Repeated(),
        (),
        in_recipe="sms",
        help=f"A target such as 86; may be given several times; without it the plan is portable. {BUILD.help('sm')}",
    )
    precision: str | None = option(OneOf(EVERY_WORD), help="Refuse a graph of another precision.")
    timing_cache: PathLike | None = option(
        FILE, help=f"TensorRT's timing cache, read and updated. {BUILD.help('timing_cache')}"
    )
    optimization_level: int | None = option(
        OPTIMIZATION_LEVEL,
        help=f"The builder's optimization level; a higher one takes longer. {BUILD.help('optimization_level')}",
    )
    workspace_mib: int | None = option(
        WORKSPACE_MIB, help=f"Limit of the builder's workspace. {BUILD.help('workspace_mib')}"
    )
    version_compatible: bool = option(
        default=False, help=f"A plan that newer TensorRT versions load too. {BUILD.help('version_compatible')}"
    )
    compatibility: Literal["ampere-plus", "same-compute-capability", "portable", "targets"] | None = option(
        help="A plan that runs on more GPUs; a plan for each GPU alone is built too, to show the price. "
        f"{BUILD.help('compatibility')}",
    )
    sparse: bool = option(
        default=False, help=f"Use sparse kernels for 2:4 weights; refused if there are none. {BUILD.help('sparse')}"
    )
    device: Literal["cpu", "cuda"] = option(default="cpu", help=BUILD.help("device"))

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        way = f"{self.backend}-{self.device}" if self.backend == "onnxruntime" else self.backend
        BUILD.refuse([("", way)], options)

    def of_engine(self, command: str) -> BuildOptions:
        """As the room of export takes them; the command goes into the record."""
        options = self.values | {"workspace_mib": self.workspace_mib and self.workspace_mib * 2**20}
        named = {ENGINE_OPTIONS.get(name, name): value for name, value in options.items() if name != "device"}
        return BuildOptions(**named, command=command)


@dataclass(frozen=True, kw_only=True)
class AuditOptions(Record):
    """In whose engines attention kernels are counted."""

    backend: Literal["tensorrt", "tensorrt-rtx"] = option(
        default="tensorrt-rtx", help="What builds both; TensorRT-RTX needs no GPU."
    )
    sm: Sequence[str] = option(Repeated(), ("86",), help=f"Targets; may be given several times. {AUDIT.help('sm')}")

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        AUDIT.refuse([("", self.backend)], options)
