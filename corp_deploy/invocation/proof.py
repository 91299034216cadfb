"""Options of proofs (`verify`, `perplexity`: limits, batch sizes, runtimes, heads, metrics) and of `gate`. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ground.errors import BadInput
from ground.quantity import (
    BATCH,
    CONFIDENCE,
    ERROR,
    FACTOR,
    LEVEL,
    MODEL_VERSION,
    NATS,
    RATIO,
    SECONDS,
    SHARE,
    THRESHOLD,
    TOKENS,
    quoted,
)

from .option import PathLike, Record, option
from .option_support import spelled
from .table import VERIFY_REFERENCE
from .values import DIRECTORY, FILE, SERVED_NAME, ListOf, OneOf, Repeated, text_of

Runtime = Literal["openvino", "openvino-fp16", "openvino-bf16"]


def confidence_option() -> Any:
    words = "Confidence of the intervals by which limits are decided; at 0 the point alone decides."
    return option(CONFIDENCE, 0.95, help=words)


OUTPUT_LIMITS = {"max_error": ERROR, "min_agreement": SHARE, "min_iou": SHARE}


@dataclass(frozen=True, kw_only=True)
class LimitOptions(Record, heading="Limits"):
    """The limits on the errors and agreements of outputs and of heads' score maps in a proof; None sets no limit.

    A limit applies to every output, one of `output_limit` to the output it names. For score maps, `max_map_error` and
    `min_pixels` replace `max_error` and `min_agreement`.
    """

    min_agreement: float | None = option(
        SHARE,
        help="Smallest share of inputs on which the reduced model agrees with the dense one, for every output: top-1 "
        "classes, the side of a threshold for one logit, nearest neighbours of embeddings, pixels of score maps.",
    )
    max_error: float | None = option(ERROR, help="Largest relative error of the reduced model, for every output.")
    half_factor: float = option(
        FACTOR, 4.0, help="FP16 and BF16 links may err by this multiple of the dense model's own error in that type."
    )
    quantised_factor: float = option(
        FACTOR, 2.0, help="INT8 and FP8 links may err by this multiple of the dense model's error under plain rounding."
    )
    max_apart: float = option(
        SHARE,
        0.05,
        help="Largest share of inputs on which rounding may change which tokens are merged; these inputs are judged "
        "separately.",
    )
    max_map_error: float | None = option(ERROR, help="Largest relative error of score maps, in place of --max-error.")
    min_iou: float | None = option(SHARE, help="Least intersection over union of score maps.")
    min_pixels: float | None = option(
        SHARE, help="Smallest share of a score map's pixels with the same class, in place of --min-agreement."
    )
    output_limit: Sequence[str] = option(
        Repeated(each=text_of("OUTPUT:LIMIT=NUMBER")),
        (),
        help="A limit for one output, in place of the general one: boxes:max_error=0.1, logits:min_agreement=0.99 or "
        "mask:min_iou=0.9; repeat.",
    )
    exclude_output: Sequence[str] = option(
        Repeated(each=text_of("OUTPUT")), (), help="An output that no limit has to judge; it is measured only; repeat."
    )
    logit_threshold: float | None = option(
        THRESHOLD,
        help="Threshold of an output of one logit; default: 0, or 0.5 if all answers of the dense model lie in [0, 1].",
    )
    confidence: float = confidence_option()

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        if "confidence" in options and not self.shares:
            raise BadInput(
                "--confidence has no effect without a share of inputs to judge; give --min-agreement or --min-pixels "
                "as well, or leave it out"
            )

    @property
    def shares(self) -> dict[str, float]:
        every: dict[str, float | None] = {"min_agreement": self.min_agreement, "min_pixels": self.min_pixels}
        for output, own in self.by_output.items():
            every[f"{output}:min_agreement"] = own.get("min_agreement")
        return {name: least for name, least in every.items() if least is not None}

    @property
    def by_output(self) -> dict[str, dict[str, float]]:
        """`output_limit` as {output: {name of the limit: number}}. Raises BadInput for a text that is not a limit."""
        limits = dict[str, dict[str, float]]()
        for text in self.output_limit:
            output, _, limit = text.rpartition(":")
            name, _, number = limit.partition("=")
            if not output or name not in OUTPUT_LIMITS:
                raise BadInput(
                    f"output limit {quoted(text)}: expected OUTPUT:LIMIT=NUMBER with one of "
                    f"{', '.join(OUTPUT_LIMITS)}, such as boxes:max_error=0.1"
                )
            if name in limits.setdefault(output, {}):
                raise BadInput(f"output limit {quoted(text)}: {output} has a {name} already; give it once")
            try:
                limits[output][name] = OUTPUT_LIMITS[name].from_text(number)
            except BadInput as error:
                raise BadInput(f"output limit {quoted(text)}: {error}") from None
        return limits


@dataclass(frozen=True, kw_only=True)
class LanguageOptions(Record, heading="Limits"):
    """The limits that `perplexity` judges each candidate by (None sets no limit), and their confidence."""

    max_ratio: float | None = option(RATIO, help="Largest perplexity, as a multiple of the dense one's.")
    min_agreement: float | None = option(SHARE, help="Smallest share of tokens with the same most likely next token.")
    max_kl: float | None = option(NATS, help="Largest KL from the dense softmax, nats a token.")
    confidence: float = confidence_option()

    @property
    def some(self) -> bool:
        return any(limit is not None for limit in (self.max_ratio, self.min_agreement, self.max_kl))


@dataclass(frozen=True, kw_only=True)
class HeadOptions(Record, heading="Separate heads"):
    """The ONNX heads for dense prediction on the model's outputs, and the threshold of one-class score maps."""

    heads: Sequence[PathLike] = option(
        Repeated(each=FILE),
        (),
        typed="head",
        in_recipe="head",
        help="ONNX graph of a dense head: its inputs are named outputs of the model, its outputs score maps "
        "[B,K,H,W] or [B,H,W]; repeat.",
    )
    map_threshold: float = option(LEVEL, 0.5, help="Threshold for score maps of a single class; 0 for logits.")


@dataclass(frozen=True, kw_only=True)
class ProofOptions(HeadOptions, LimitOptions, heading="Proof"):
    """The options of a proof in Python and recipes: limits, heads, batch sizes and runtimes."""

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
        every = super().command_options
        return {name: value for name, value in every.items() if self.shares or name != "confidence"}


@dataclass(frozen=True, kw_only=True)
class ProofFiles(Record, heading="Proof"):
    """The parity.json that a proof writes, and the moments of the calibration images to compare its images with.

    Raises BadInput for an `output` that ends in .npz, the suffix of the per-image figures beside it.
    """

    output: PathLike | None = option(FILE, help="parity.json to write; per-image figures go to .npz beside it.")
    moments: PathLike | None = option(
        FILE, help="Moments of the calibration: report whether these images look like its images."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output is not None and Path(self.output).suffix == ".npz":
            raise BadInput(f"--output: {self.output}: the per-image figures go there; expected .json")


@dataclass(frozen=True, kw_only=True)
class MetricOptions(Record, heading="Proof"):
    """Metrics that the user's commands or functions compute from the models' outputs, and the time limit of a run."""

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


@dataclass(frozen=True, kw_only=True)
class GateOptions(Record):
    """The options of `gate`: rules, the history of releases, and files for benchmark tracking and dashboards."""

    rules: Sequence[str] = option(
        Repeated(),
        (),
        typed="fail_if",
        in_recipe="fail_if",
        help="What must not happen, such as 'p50@b1 > baseline*1.03'; may be given several times.",
    )
    confidence: float = confidence_option()
    history: Path | None = option(
        DIRECTORY,
        help="Judge bench.json against the releases kept in this directory, then add it; nothing there is overwritten.",
    )
    track: Path | None = option(
        DIRECTORY, in_recipe=False, help="Write files for benchmark tracking here: lists for actions, bencher.json."
    )
    metrics: Path | None = option(
        FILE, in_recipe=False, help="Write promised figures and verdict as OpenMetrics text, for dashboards."
    )
    name: str | None = option(
        SERVED_NAME,
        in_recipe=False,
        help="With --metrics: the model's name on the server; default: that of the release beside the records.",
    )
    model_version: int | None = option(
        MODEL_VERSION, in_recipe=False, help="With --metrics: its version on the server; default: the release's."
    )

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        if "confidence" in options and not self.rules:
            raise BadInput("--confidence has no effect without rules to judge; give one with --fail-if")
        for name in ("name", "model_version"):
            if self.metrics is None and name in options:
                raise BadInput(f"{spelled(name)} labels the figures of --metrics: give --metrics FILE")


@dataclass(frozen=True, kw_only=True)
class DecoderProof(Record, heading="A decoder's graph"):
    """The options of `verify` for a decoder's graph: tokens of a sequence, and the execution provider."""

    length: int = option(TOKENS, 32, help=f"Tokens of a sequence. {VERIFY_REFERENCE.help('length')}")
    provider: Literal["cpu", "cuda"] = option(
        default="cpu",
        help="ONNX Runtime's execution provider; there is no fallback to another one. cuda takes fp16 only. "
        f"{VERIFY_REFERENCE.help('provider')}",
    )
