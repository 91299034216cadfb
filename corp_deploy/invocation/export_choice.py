"""Options of `export` and `export-decoder`. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ground.errors import BadInput
from ground.precision import EVERY_WORD, MIXED, QUANTISED, precision_by_name
from ground.quantity import BATCH, OPSET, TOKENS, Count

from .option import NEEDED, PathLike, Record, option, options_of
from .table import EXPORT, EXPORT_FORMAT, EXPORT_HEADS
from .values import DIRECTORY, FILE, ListOf, OneOf, Repeated

SUFFIX = ".pt2"  # of packages, which export.graph.package_notes reads


@dataclass(frozen=True)
class ExportFiles(Record):
    """The file that `export` writes, a positional parameter in Python."""

    output: PathLike = option(
        FILE,
        NEEDED,
        help="ONNX file to write, or the .pt2 of --format aoti; of several precisions fp32 is written there, others "
        "as NAME.fp16.onnx and so on beside it.",
    )


@dataclass(frozen=True, kw_only=True)
class QuantisedOptions(Record, heading="INT8 and FP8"):
    """The options of INT8 and FP8 graphs."""

    rest: Literal["fp16", "bf16", "fp32"] = option(
        default="fp16",
        help="For int8 and fp8: the precision of everything outside the quantised layers; for ONNX Runtime on a "
        "CPU take fp32.",
    )
    scales: Literal["auto", "max", "mse", "entropy"] = option(
        default="auto",
        help="For int8 and fp8: how the ranges of activations are chosen; auto uses the way with outputs nearest "
        "to FP32.",
    )
    balance: bool = option(
        default=True,
        help="For int8 and fp8: move outliers from norms into the next weights (SmoothQuant); outputs don't change.",
    )
    keep_rest: Sequence[str] = option(
        Repeated(),
        (),
        help="For int8 and fp8: modules that stay in the precision of --rest, with all below them, such as "
        "blocks.7.mlp.",
    )
    weight_bits: int = option(
        Count(low=7, high=8),
        8,
        help="For int8: bits used of a weight; with 7 the sixteen-bit sums of CPUs without VNNI can't overflow.",
    )


@dataclass(frozen=True, kw_only=True)
class GraphOptions(Record, heading="Graph"):
    """The options of a graph apart from its precision; `heads` None keeps the model's head geometry."""

    format: Literal["onnx", "aoti"] = option(
        default="onnx",
        in_recipe=False,
        help="aoti: compile a package of AOTInductor, native code for this kind of machine, which Triton serves as "
        f"torch_aoti; needs a C++ compiler and takes about a minute. Precisions: {EXPORT_FORMAT.help('precision')}",
    )
    device: Literal["cpu", "cuda"] = option(
        default="cpu",
        in_recipe=False,
        help=f"What it is compiled for; cuda needs that GPU. {EXPORT_FORMAT.help('device')}",
    )
    opset: int | None = option(
        OPSET,
        in_recipe=False,
        help="ONNX operator set; default: 20, 22 if BF16 needs it, 23 if an RMS norm needs it.",
    )
    batch: int | None = option(BATCH, in_recipe=False, help="Fix the batch size; default: any batch size.")
    heads: Literal["padded", "ragged"] | None = option(
        in_recipe=False, help=f"Replace the head geometry. {EXPORT_HEADS.help('heads')}"
    )
    graph_input: Literal["float32", "uint8"] = option(
        default="float32",
        typed="input",
        in_recipe="input",
        help="uint8: the graph takes pixels [N,C,H,W], resized and cropped, and normalises them itself: in FP32 "
        "folded into a first convolution that does not pad, else by operators ahead of it.",
    )
    break_fusion: Sequence[str] = option(
        Repeated(),
        (),
        help="Keep builders from fusing across the output of a module (blocks.7, blocks.7.attn, blocks.*.mlp) or "
        "of a node (blocks.7.attn/Softmax, which prevents fused attention): it becomes an output of the graph "
        "that nobody reads; with commas, or repeat.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(self.breaks):
            raise BadInput("--break-fusion has an empty name; give modules with commas, such as blocks.7.attn,blocks.8")

    @property
    def breaks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(site.strip() for text in self.break_fusion for site in text.split(",")))


@dataclass(frozen=True, kw_only=True)
class ExportOptions(GraphOptions, QuantisedOptions, heading="Precision"):
    """All options of `export`: precisions, the modules that mixed graphs keep in FP32, and the form of the graph.

    Raises BadInput for an option that has no effect with these precisions, for a mixed precision without modules to
    keep, and for a search (`auto`) that no precision needs.
    """

    precision: str | Sequence[str] = option(
        ListOf(OneOf(EVERY_WORD), "fp32,fp16"),
        ("fp32",),
        in_recipe="precisions",
        help="One or several, with commas; mixed is FP16 and FP32, mixed-bf16 BF16 and FP32; int8 and fp8 compute "
        "ranges on --images.",
    )
    keep_fp32: Sequence[str] = option(
        Repeated(),
        (),
        help="Modules that mixed graphs keep in FP32, with all below them, such as blocks.7, in addition to those that "
        "--auto finds.",
    )
    auto: bool = option(
        default=False,
        in_recipe=False,
        help="For mixed, int8 and fp8: find the blocks that break, on --images, and keep them in the higher precision.",
    )
    engine: Literal["tensorrt", "tensorrt-rtx"] | None = option(
        in_recipe=False,
        help="For --auto: judge engines, built and run on this machine's GPU, instead of graphs; if a fused kernel "
        "is wrong, its fusion is prevented before blocks are kept in a higher precision.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_ignored(self.non_default)
        if self.mixed and not (self.keep_fp32 or self.auto):
            pure = precision_by_name(self.mixed[0]).pure
            raise BadInput(
                f"precision {' and '.join(self.mixed)} needs --keep-fp32 PATTERN, such as blocks.7.attn, or --auto, or "
                f"both; else choose {pure}"
            )
        if self.auto and not (self.mixed or self.quantised):
            raise BadInput(f"--auto is for precisions {', '.join((*MIXED, *QUANTISED))}; give one of them")

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        searching = (*MIXED, *QUANTISED) if self.auto else ()
        EXPORT_FORMAT.refuse([("", self.format)], options)
        EXPORT.refuse([("", f"{name}-auto" if name in searching else name) for name in self.precisions], options)

    def require_suffix(self, output: Path) -> None:
        """Raise BadInput for a path whose suffix belongs to the other format."""
        if (output.suffix == SUFFIX) != (self.format == "aoti"):
            expected = f"a name that ends in {SUFFIX}" if self.format == "aoti" else f"--format aoti for a {SUFFIX}"
            raise BadInput(f"--output: {output}: got --format {self.format}, expected {expected}")

    def require_inputs(self, has_inputs: bool) -> None:
        """Raise BadInput for absent inputs that a precision or `auto` needs, and for inputs that nothing needs."""
        if self.quantised and not has_inputs:
            raise BadInput(
                f"{' and '.join(self.quantised)} computes its ranges from real inputs; give --images (or --text)"
            )
        if self.auto != has_inputs and not self.quantised:
            raise BadInput("--auto looks for the blocks on real inputs; give --auto and --images (or --text) together")

    @property
    def command_options(self) -> dict[str, Any]:
        """The options to print in a command: precision, non-default options, and INT8's and FP8's even if default."""
        options = options_of(ExportOptions)
        names = ("precision", *self.non_default, *(("rest", "scales", "balance") if self.quantised else ()))
        typed = {options[name].typed for name in names}
        return {name: value for name, value in super().command_options.items() if name.removeprefix("no_") in typed}

    @property
    def precisions(self) -> tuple[str, ...]:
        return tuple(self.precision)

    @property
    def mixed(self) -> tuple[str, ...]:
        """The mixed precisions among `precision`: those with some modules in FP32."""
        return tuple(name for name in self.precisions if name in MIXED)

    @property
    def quantised(self) -> tuple[str, ...]:
        return tuple(name for name in self.precisions if name in QUANTISED)


@dataclass(frozen=True, kw_only=True)
class DecoderExport(Record):
    """The options of `export-decoder`: the precision, and the model and sequences for which cache sizes are shown."""

    precision: Literal["fp32", "int8", "int4", "fp16"] = option(
        default="fp32", help="int8 and int4 quantise weights only; fp16 is for GPUs, the others for CPUs."
    )
    baseline: Path | None = option(DIRECTORY, help="The dense model's directory, to compare caches.")
    length: int = option(TOKENS, 2048, help="Tokens per sequence for which cache sizes are shown.")
    batch: int = option(BATCH, 1, help="Sequences for which cache sizes are shown.")
