"""Options of `bench`: how two models are run side by side and measured. No torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ground.errors import BadInput
from ground.quantity import BATCH, MILLISECONDS, ROUNDS, SECONDS, SHARE_KEPT, STREAMS, THREADS

from .inputs import refuse_several
from .option import PathLike, Record, option
from .table import BENCH
from .values import FILE, ListOf, ParsedText

if TYPE_CHECKING:
    from perf.timing.laps import Plan

Backend = Literal["onnxruntime", "openvino", "torch", "aotinductor"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class RunOptions(Record, heading="What runs them"):
    """How both are run; None is the default of the backend. An option that the backend would ignore is refused.

    `backend` is for model directories: torch, aotinductor after compiling a package, or onnxruntime (the default) or
    openvino after an export to FP32, which is for graphs, too. See BENCH.
    """

    backend: Backend | None = option(
        unset="onnxruntime",
        help="What runs them; a model directory is exported to FP32 first for onnxruntime and openvino, compiled first "
        "for aotinductor.",
    )
    device: Device | None = option(
        unset="cpu", help=f"Where torch runs them; for the others, where they must run. {BENCH.help('device')}"
    )
    provider: Literal["cpu", "cuda", "tensorrt"] | None = option(
        unset="cpu",
        help="ONNX Runtime's execution provider; there is no fallback to another one. " + BENCH.help("provider"),
    )
    mode: Literal["eager", "compiled", "cuda_graph"] | None = option(unset="eager", help=BENCH.help("mode"))
    dtype: Literal["fp32", "fp16", "bf16"] | None = option(
        unset="fp32",
        help="The type that torch casts weights to and that OpenVINO computes in; other graphs and engines have "
        f"their own types. {BENCH.help('dtype')}",
    )
    streams: int | None = option(STREAMS, unset="1", help="Above 1: throughput only.")
    flush_l2: bool = option(
        default=False, help=f"Overwrite the GPU's L2 cache before each call. {BENCH.help('flush_l2')}"
    )
    threads: int | None = option(
        THREADS, help=f"CPU threads of both; default: the runtime's choice. {BENCH.help('threads')}"
    )

    @property
    def cuda_graph(self) -> bool:
        return self.mode == "cuda_graph"


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Record, heading="How long"):
    """How long is measured."""

    time_limit: float = option(
        SECONDS,
        20.0,
        in_recipe="time_limit_s",
        help="Seconds per batch size, at most, with loading, warm-up and the dense model's run against itself; a "
        "running call is not interrupted. A batch size that takes longer is reported as not measured.",
    )
    half_width: float = option(
        SHARE_KEPT,
        0.01,
        help="Stop when the interval of the speed-up is this narrow (half width, as a share of its value).",
    )
    block_ms: float = option(MILLISECONDS, 25.0, help="How long a block lasts.")
    min_rounds: int = option(ROUNDS, 16, help="Rounds at least, of 4 blocks.")
    audit: bool = option(
        default=False,
        help="Also time each model on one repeated batch against varied ones: a model that answers from a cache is "
        "reported, and no gate passes with it.",
    )

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
    """As rules of the gate can spell them."""
    names = [name.strip() for name in text.split(",")]
    if len(set(names)) != 2 or not all(re.fullmatch(r"[A-Za-z][\w-]{0,63}", name) for name in names):
        raise BadInput(f"{text[:100]!r} is not two names of letters, digits and dashes, such as fp16,int8")
    return names[0], names[1]


@dataclass(frozen=True, kw_only=True)
class BenchOptions(PlanOptions, RunOptions, heading="What is timed"):
    """All options of `bench`."""

    batches: Sequence[int] = option(ListOf(BATCH, "1,8,32"), (1, 8, 32), typed="batch", help="Batch sizes to measure.")
    names: tuple[str, str] = option(
        ParsedText(span="name,name", expected="two names", kind=tuple, read=_two_names),
        ("dense", "reduced"),
        help="Names of the two in the record, such as fp16,int8.",
    )

    @property
    def running(self) -> RunOptions:
        return RunOptions.from_options(self.values)


@dataclass(frozen=True, kw_only=True)
class BenchFiles(Record):
    """What `bench` writes."""

    output: PathLike | None = option(FILE, help="bench.json to write, raw samples and all.")


@dataclass(frozen=True, kw_only=True)
class TextFed(Record, heading="Inputs"):
    """Texts that both are fed."""

    text: PathLike | None = option(
        FILE, help="Texts, one a line, for the tokenizer of a model directory; default: random tokens."
    )


@dataclass(frozen=True, kw_only=True)
class FedOptions(TextFed):
    """What both are fed. Raises BadInput for images and texts at once."""

    images: Path | None = option(
        FILE,
        help="Inputs, repeated if there are too few: .npy, .npz or .safetensors as for verify; default: noise.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_several(self.non_default)
