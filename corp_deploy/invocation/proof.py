"""Options of a proof: limits, batch sizes, runtimes, heads and measures. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ground.errors import BadInput
from ground.quantity import BATCH, LEVEL, SECONDS

from .option import PathLike, Record, option
from .proof_limits import LimitOptions
from .table import VERIFY_HEADS
from .values import FILE, ListOf, OneOf, Repeated, text_of

Runtime = Literal["openvino", "openvino-fp16", "openvino-bf16"]


@dataclass(frozen=True, kw_only=True)
class HeadOptions(Record, heading="Heads apart"):
    """What looks at outputs."""

    heads: Sequence[PathLike] = option(
        Repeated(each=FILE),
        (),
        typed="head",
        in_recipe="head",
        help="ONNX graph of a dense head: its inputs are named outputs of the model, its outputs score maps "
        "[B,K,H,W] or [B,H,W]; repeat.",
    )
    map_threshold: float = option(LEVEL, 0.5, help="Threshold for maps of a single class; 0 for logits.")

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        VERIFY_HEADS.refuse([("", self._way)], options)
        super().refuse_ignored(options)

    @property
    def _way(self) -> str:
        return "some" if self.heads else "none"


@dataclass(frozen=True, kw_only=True)
class ProofOptions(HeadOptions, LimitOptions, heading="Proof"):
    """The limits, with what is run and what looks at its outputs."""

    batches: Sequence[int] = option(
        ListOf(BATCH, "1,8,32"), (1, 7, 32), typed="batch", help="Batch sizes to run every candidate at."
    )
    runtimes: Sequence[Runtime] = option(
        Repeated(each=OneOf(get_args(Runtime))),
        (),
        typed="runtime",
        in_recipe=False,
        help="Also judge every graph in this runtime, as a link of its own after ONNX Runtime's: in the graph's "
        "types, or computed in FP16 or BF16; repeat.",
    )

    @property
    def command_options(self) -> dict[str, Any]:
        supported = VERIFY_HEADS.supported(self._way, super().command_options)
        return {name: value for name, value in supported.items() if self.shares or name != "confidence"}


@dataclass(frozen=True, kw_only=True)
class MetricOptions(Record, heading="Proof"):
    """Measures of the user's own."""

    metric: Sequence[str] = option(
        Repeated(each=text_of("[NAME=]COMMAND")),
        (),
        help="A measure of your own for gate rules (metric.NAME < dense - 0.01): a command, run without a shell "
        "for the dense model and each candidate, with the .npz of its outputs, names and labels in place of "
        "{outputs}; the last line that it prints is the number. Or module:PATH.py:FUNCTION (with "
        "--trust-code), given the arrays. Engines that are compared without their model have no labels. Only "
        "commands given here or in a recipe are run; repeat.",
    )
    metric_time_limit: float = option(
        SECONDS, 600.0, in_recipe=False, help="Seconds that one run of a --metric may take."
    )

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        super().refuse_ignored(options)
        if "metric_time_limit" in options and not self.metric:
            raise BadInput("--metric-time-limit is for --metric; give that too, or leave it out")
