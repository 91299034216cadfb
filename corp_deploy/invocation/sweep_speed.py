"""Options of timing and building the trials of a sweep, and which runtime honours which. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ground.errors import BadInput
from ground.quantity import BATCH, SECONDS, SHARE_KEPT, THREADS

from .option import Record, option
from .option_support import Axis, variant
from .values import ListOf, Repeated

_TIMED = "batch time_limit half_width"
BENCH = Axis(
    variants={
        "none": variant("a sweep that times nothing", "no --bench"),
        "built": variant("a sweep that builds engines", "--engine tensorrt-rtx", "batch"),
        "onnxruntime": variant("ONNX Runtime", "--bench onnxruntime", f"{_TIMED} threads device precision=fp32,fp16"),
        "openvino": variant("OpenVINO", "--bench openvino", f"{_TIMED} threads device=cpu precision"),
        "torch": variant("torch", "--bench torch", f"{_TIMED} threads device precision"),
        "engine": variant("engines", "--bench engine", f"{_TIMED} device=cuda"),
    },
)


@dataclass(frozen=True, kw_only=True)
class SweepSpeedChoice(Record, heading="Timing and engines"):
    """`bench`: what times trials, None nothing; `engine`: what builds engines of them, None nothing.

    Raises BadInput for targets of no engine, and for engines to time that nothing builds.
    """

    bench: Literal["onnxruntime", "openvino", "torch", "engine"] | None = option(
        help="Time every trial beside the dense model, interleaved in one process, in this runtime; engine: the "
        "engines that --engine builds, on a GPU. Default: no timing.",
    )
    engine: Literal["tensorrt", "tensorrt-rtx"] | None = option(
        help="Build an FP16 engine of every trial: its size and fused attentions are in the table. TensorRT-RTX "
        "needs no GPU for that.",
    )
    sm: tuple[str, ...] = option(Repeated(), (), help="A target of TensorRT-RTX such as 89; repeat.")
    batch: tuple[int, ...] = option(
        ListOf(BATCH, "1,8,32"), (1, 16), help="Batch sizes to time, and that engines accept."
    )
    precision: Literal["fp32", "fp16", "bf16"] = option(
        default="fp32", help=f"Precision of the timed models; engines are FP16. {BENCH.help('precision')}"
    )
    threads: int | None = option(THREADS, help=f"CPU threads for timing. {BENCH.help('threads')}")
    device: Literal["cpu", "cuda"] = option(default="cpu", help="Where trials are timed.")
    time_limit: float = option(
        SECONDS,
        5.0,
        help="Seconds per trial and batch size, at most, with loading, warm-up and the dense model's run against "
        "itself.",
    )
    half_width: float = option(SHARE_KEPT, 0.02, help="Stop when the interval of a speed-up is this narrow.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bench == "engine" and self.engine is None:
            raise BadInput("--bench engine times engines; say what builds them: --engine tensorrt-rtx")
        if self.sm and self.engine is None:
            raise BadInput("--sm names targets of engines; give --engine tensorrt-rtx with it")

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        BENCH.refuse([("", self.bench or ("built" if self.engine else "none"))], options)
