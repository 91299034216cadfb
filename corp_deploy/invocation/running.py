"""Options of timing models side by side (`bench`, also of decoders, and the trials of `sweep`). Imports no torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ground.errors import BadInput
from ground.places import Place
from ground.quantity import (
    BATCH,
    LAUNCHES,
    MILLISECONDS,
    ROUNDS,
    SECONDS,
    SECONDS_OR_NONE,
    SHARE_KEPT,
    STREAMS,
    THREADS,
    TOKENS,
)

from .input_choice import refuse_several
from .option import PathLike, Record, option
from .option_support import Axis, variant
from .table import BENCH, BENCH_OF
from .values import FILE, PLACE, ListOf, ParsedText, Repeated

if TYPE_CHECKING:
    from perf.timing.laps import Plan


ENERGY_S, ENERGY_PER_LIMIT = 60.0, 3  # 60 s has eight rounds, which a rule needs to fail
Backend = Literal["onnxruntime", "openvino", "torch", "aotinductor"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class RunOptions(Record, heading="Backend"):
    """The backend that runs both models, and its options; None is the backend's default.

    The backends torch, aotinductor (which compiles the model first), onnxruntime and openvino (which run its FP32
    export) run model directories; onnxruntime and openvino run graphs, too. An option that the backend ignores is
    refused, see BENCH.
    """

    backend: Backend | None = option(
        in_recipe=False,
        unset="onnxruntime",
        help="Runtime of both models; a model directory is exported to FP32 first for onnxruntime and openvino, "
        "compiled first for aotinductor.",
    )
    device: Device | None = option(
        in_recipe=False,
        unset="cpu",
        help=f"Device that torch runs the models on; other backends run on one device only. {BENCH.help('device')}",
    )
    provider: Literal["cpu", "cuda", "tensorrt"] | None = option(
        in_recipe=False,
        unset="cpu",
        help="ONNX Runtime's execution provider; there is no fallback to another one. " + BENCH.help("provider"),
    )
    mode: Literal["eager", "compiled", "cuda_graph"] | None = option(
        unset="eager", in_recipe=False, help=f"How the models are executed. {BENCH.help('mode')}"
    )
    dtype: Literal["fp32", "fp16", "bf16"] | None = option(
        in_recipe=False,
        unset="fp32",
        help="The type that torch casts weights to and that OpenVINO computes in; other graphs and engines have "
        f"their own types. {BENCH.help('dtype')}",
    )
    streams: int | None = option(
        STREAMS, unset="1", in_recipe=False, help="Concurrent streams; above 1, only throughput is measured."
    )
    flush_l2: bool = option(
        in_recipe=False, default=False, help=f"Overwrite the GPU's L2 cache before each call. {BENCH.help('flush_l2')}"
    )
    threads: int | None = option(
        THREADS, help=f"CPU threads of both; default: the runtime's choice. {BENCH.help('threads')}"
    )

    @property
    def cuda_graph(self) -> bool:
        return self.mode == "cuda_graph"


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Record, heading="Measurement"):
    """The time limit, the precision, the blocks and the rounds of a measurement, and the audit for cached answers."""

    time_limit: float = option(
        SECONDS,
        20.0,
        in_recipe="time_limit_s",
        help="Seconds per batch size, at most, with loading, warm-up and the dense model's run against itself; a "
        "running call is not interrupted. A batch size that takes longer is reported as not measured.",
    )
    energy_time: float | None = option(
        SECONDS_OR_NONE,
        unset="60, but at most 3 times --time-limit",
        in_recipe="energy_time_s",
        help="Seconds per batch size, beyond --time-limit, to measure joules per image if this machine has a sensor "
        "(see doctor); 0 measures none.",
    )
    half_width: float = option(
        SHARE_KEPT,
        0.01,
        help="Stop when the interval of the speed-up is this narrow (half width, as a share of its value).",
    )
    block_ms: float = option(MILLISECONDS, 25.0, help="How long a block lasts.")
    min_rounds: int = option(ROUNDS, 16, help="Rounds at least, of 4 blocks.")
    launches: int = option(
        LAUNCHES,
        1,
        help="Fresh processes in which both models are loaded and timed, one after the other, each with the whole time "
        "limit; the intervals then cover the variation between launches.",
    )
    audit: bool = option(
        default=False,
        help="Also time each model on one repeated batch against varied ones: a model that answers from a cache is "
        "reported, and no gate passes with it.",
    )

    @property
    def energy_limit_s(self) -> float:
        most_s = min(ENERGY_S, ENERGY_PER_LIMIT * self.time_limit)
        return most_s if self.energy_time is None else self.energy_time

    @property
    def plan(self) -> "Plan":
        from perf.timing.laps import AUDIT_ROUNDS, Plan

        return Plan(
            time_limit_s=self.time_limit,
            half_width_rel=self.half_width,
            block_ms=self.block_ms,
            min_rounds=self.min_rounds,
            audit_rounds=AUDIT_ROUNDS * self.audit,
        )


def _two_names(text: str) -> tuple[str, str]:
    names = [name.strip() for name in text.split(",")]
    if len(set(names)) != 2 or not all(re.fullmatch(r"[A-Za-z][\w-]{0,63}", name) for name in names):
        raise BadInput(f"{text[:100]!r} is not two names of letters, digits and dashes, such as fp16,int8")
    return names[0], names[1]


@dataclass(frozen=True, kw_only=True)
class BenchOptions(PlanOptions, RunOptions, heading="What is timed"):
    """The batch sizes, names, backend and measurement of `bench`."""

    batches: Sequence[int] = option(ListOf(BATCH, "1,8,32"), (1, 8, 32), typed="batch", help="Batch sizes to measure.")
    names: tuple[str, str] = option(
        ParsedText(span="name,name", expected="two names", kind=tuple, read=_two_names),
        ("dense", "reduced"),
        in_recipe=False,
        help="Names of the two in the record, such as fp16,int8.",
    )

    @property
    def running(self) -> RunOptions:
        return RunOptions.from_options(self.values)


@dataclass(frozen=True, kw_only=True)
class BenchFiles(Record):
    """The file that `bench` writes."""

    output: PathLike | None = option(FILE, help="bench.json to write, with all raw samples.")


@dataclass(frozen=True, kw_only=True)
class TextFed(Record, heading="Inputs"):
    """The texts that both models are timed on."""

    text: PathLike | None = option(
        FILE, help="Texts, one a line, for the tokenizer of a model directory; default: random tokens."
    )


@dataclass(frozen=True, kw_only=True)
class FedOptions(TextFed):
    """The inputs that both models are timed on. Raises BadInput for images together with texts."""

    images: Place | None = option(
        PLACE,
        help="Inputs, repeated if there are too few: .npy, .npz or .safetensors as for verify; default: noise.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_several(self.non_default)


_TIMED = "batch time_limit half_width"
TRIALS = Axis(
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
    """The runtime that times the trials of a sweep (`bench`), and the builder of their engines (`engine`).

    None times nothing, or builds no engines. Raises BadInput for targets of engines, or for timing of engines, without
    a builder.
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
        default="fp32", help=f"Precision of the timed models; engines are FP16. {TRIALS.help('precision')}"
    )
    threads: int | None = option(THREADS, help=f"CPU threads for timing. {TRIALS.help('threads')}")
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
        TRIALS.refuse([("", self.bench or ("built" if self.engine else "none"))], options)


@dataclass(frozen=True, kw_only=True)
class DecoderLoad(Record, heading="Graphs of decoders"):
    """The work that decoders are timed on: prefill of one prompt of each length, and decoding.

    A decoding step computes the next token of every sequence of a batch, with `cached` tokens in the cache. `batches`,
    `provider` and `threads` are taken from BenchOptions.
    """

    lengths: Sequence[int] = option(
        ListOf(TOKENS, "16,64,256"),
        (16, 64, 256),
        typed="length",
        help=f"Lengths of prompts to measure, one prompt at a time. {BENCH_OF.help('length')}",
    )
    cached: int = option(TOKENS, 256, help=f"Tokens in the cache while decoding. {BENCH_OF.help('cached')}")
    batches: Sequence[int] = (1, 4, 16)
    provider: Literal["cpu", "cuda"] = "cpu"
    threads: int | None = None

    @property
    def longest(self) -> int:
        return max(*self.lengths, self.cached + 1)
