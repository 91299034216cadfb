"""Options for graphs of decoders: writing, comparing and timing them. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ground.quantity import BATCH, TOKENS

from .option import Record, option
from .table import BENCH_OF, VERIFY_REFERENCE
from .values import DIRECTORY, ListOf


@dataclass(frozen=True, kw_only=True)
class DecoderExport(Record):
    """The precision, and what cache sizes are shown for."""

    precision: Literal["fp32", "int8", "int4", "fp16"] = option(
        default="fp32", help="int8 and int4 quantise weights only; fp16 is for GPUs, the others for CPUs."
    )
    baseline: Path | None = option(DIRECTORY, help="The dense model's directory, to compare caches.")
    length: int = option(TOKENS, 2048, help="Tokens per sequence for which cache sizes are shown.")
    batch: int = option(BATCH, 1, help="Sequences for which cache sizes are shown.")


@dataclass(frozen=True, kw_only=True)
class DecoderProof(Record, heading="A decoder's graph"):
    """How `verify` runs a decoder's graph."""

    length: int = option(TOKENS, 32, help=f"Tokens of a sequence. {VERIFY_REFERENCE.help('length')}")
    provider: Literal["cpu", "cuda"] = option(
        default="cpu",
        help="ONNX Runtime's execution provider; there is no fallback to another one. cuda takes fp16 only. "
        f"{VERIFY_REFERENCE.help('provider')}",
    )


@dataclass(frozen=True, kw_only=True)
class DecoderLoad(Record, heading="Graphs of decoders"):
    """What is timed: prompts of these lengths, one at a time, then one token of each of so many sequences that have
    `cached` tokens behind them. The rest is as of models, see BenchOptions.
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
