"""Options of the method: shares to remove, a preset, replacements of its parts, sparse weights. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from corp_deploy.reduction.method import (
    CHANNEL_REPAIRS,
    CONV_REPAIRS,
    HEADS_RANKINGS,
    HEADS_REPAIRS,
    MLP_RANKINGS,
    MLP_REPAIRS,
    PRESETS,
    QK_RANKINGS,
    QK_RECOVERIES,
    Method,
    method_from_preset,
)
from corp_deploy.spec.sparsity import (
    DEFAULT_PERMUTE,
    DEFAULT_RULE,
    KINDS,
    Permute,
    Rule,
    SparseKind,
    Sparsity,
    sparsity_from_text,
)
from ground.errors import BadInput
from ground.quantity import ALIGNMENT, RIDGE, SHARE_REMOVED

from .option import Record, option
from .option_support import Axis, words_of
from .reduction_table import LOOP, PRESET, preset_way
from .values import CHANNELS, ByKind, OneOf, ParsedText

RIDGE_OF_BEST = 1e-3
"""The ridge of preset best; a weaker one can err several times as much on inputs unlike those of the fit."""
HeadsName = Literal["padded", "square", "ragged", "auto"]
WIDTHS = "mlp=64,head=16,conv=32"
"""The default multiples that widths are rounded to, by kind of site."""
MULTIPLES = ByKind(dict.fromkeys(("mlp", "head", "conv"), ALIGNMENT))
ALIGN: Mapping[str, int] = MULTIPLES.from_text(WIDTHS)
RANKINGS = {"mlp": MLP_RANKINGS, "head": QK_RANKINGS, "conv": MLP_RANKINGS, "heads": HEADS_RANKINGS}
RANKING = ByKind({kind: OneOf(words) for kind, words in (RANKINGS | {CHANNELS: MLP_RANKINGS}).items()})
REPAIRS = {"mlp": MLP_REPAIRS, "conv": CONV_REPAIRS, "heads": HEADS_REPAIRS}
REPAIR = ByKind({kind: OneOf(words) for kind, words in (REPAIRS | {CHANNELS: CHANNEL_REPAIRS}).items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """A named combination of a preset (`method`) and other options of `reduce` (`implied`)."""

    method: str
    implied: Mapping[str, Any]

    @property
    def describe(self) -> str:
        options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.implied.items())
        return f"--preset {self.method} {options}"


COMPOSITIONS: Mapping[str, Composition] = MappingProxyType(
    {"thorough": Composition(method="best", implied={"closed_loop": "asymmetric", "polish": "layer"})}
)
NAMES = (*PRESETS, *COMPOSITIONS)


def method_of(preset: str) -> str:
    return COMPOSITIONS[preset].method if preset in COMPOSITIONS else preset


def with_implied(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of `reduce`, with None replaced by the values that the preset's Composition implies."""
    preset = options.get("preset")
    implied = COMPOSITIONS[str(preset)].implied if preset in COMPOSITIONS else {}
    return {**options, **{name: value for name, value in implied.items() if options.get(name) is None}}


@dataclass(frozen=True, kw_only=True)
class GeometryOptions(Record, heading="Widths and method"):
    """The head geometry and the multiples that widths are rounded to, for `sweep` and `latency-table`."""

    heads: Literal["padded", "square", "ragged"] = option(default="padded", help="Geometry.")
    align: Mapping[str, int] = option(MULTIPLES, WIDTHS, help="Multiples of widths.")


@dataclass(frozen=True, kw_only=True)
class MethodChoice(Record, heading="Widths and method"):
    """A preset, shares of channels, dimensions and heads to remove, and options that replace parts of the preset.

    Raises BadInput for options that contradict one another.
    """

    mlp: float | None = option(
        SHARE_REMOVED,
        help="Share of MLP hidden channels to remove; 0 repairs at full width; default: MLPs are left alone.",
    )
    attn: float | None = option(
        SHARE_REMOVED,
        help="Share of query/key dimensions to remove; 0 repairs at full width; default: attention is left alone.",
    )
    conv: float | None = option(
        SHARE_REMOVED,
        help="Share of the channels between convolutions to remove; 0 repairs at full width; default: they are left "
        "alone.",
    )
    residual: float | None = option(
        SHARE_REMOVED,
        help="Share of the channels of residual streams of convolutions to remove, the same for all layers that "
        "write or read a stream. Moments of calibrate --patch-memory also need calibrate --residual.",
    )
    whole_heads: float | None = option(
        SHARE_REMOVED,
        help="Share of the attention heads to remove, at least one is kept; the output projection is refitted. "
        "--attn then narrows the remaining heads. " + PRESET.help("whole_heads"),
    )
    preset: str = option(
        OneOf(NAMES),
        "best",
        help="How to choose and repair. "
        + "; ".join(f"{name}: {composition.describe}" for name, composition in COMPOSITIONS.items())
        + ", unless those options are given; for use with a budget.",
    )
    select: str | Mapping[str, str] | None = option(
        RANKING,
        help="Rank by another criterion than the preset's: energy, magnitude, combined, active, variance, wanda, "
        "obs, producer-l1 or producer-l2 of all channels, or by kind: mlp=producer-l2, head=magnitude "
        "(dimensions of heads), conv=wanda, heads=grail (whole heads).",
    )
    repair: str | Mapping[str, str] | None = option(
        REPAIR,
        help="Repair in another way than the preset: none, bias, gram or affine of all channels, or by kind: "
        "mlp=affine-v1, conv=im2col, heads=gram.",
    )
    qk: str | None = option(
        OneOf(QK_RECOVERIES),
        help="How to reduce queries and keys, if not as the preset does: dimensions selected without repair "
        "(select), or repaired by CORP's equations (logit, which needs moments of calibrate "
        "--attention-system; logit-v1), the low-rank basis with the least loss (lowrank), or all kept (keep).",
    )
    heads: HeadsName = option(
        default="padded",
        help="padded and square keep engines' fused attention, ragged loses it; auto takes the better one at equal "
        "MACs.",
    )
    rotate: bool | None = option(
        help="Rotate reduced heads (queries and keys, and values) by a Hadamard matrix where their width is a "
        "power of two: the same outputs, more even ranges, less loss in INT8. Default: on with preset best, "
        "off with the published ones.",
    )
    align: Mapping[str, int] = option(MULTIPLES, WIDTHS, help="Multiples that widths are rounded to; at least 8.")
    ridge: float | None = option(
        RIDGE,
        help="Regularisation, relative to the mean diagonal of the matrix it is added to. Default: 0.001 with preset "
        "best, 0.0001 with the published ones.",
    )
    rescale: bool = option(
        default=False,
        help="Then rescale every convolution to the dense mean and variance of each channel on --images (REPAIR): "
        "no labels, no cost at run time. " + LOOP.help("rescale"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.method

    @property
    def sparsities(self) -> tuple[float | None, ...]:
        """The shares to remove (mlp, attn, conv, residual, whole_heads), None for a kind of site that is left alone."""
        return self.mlp, self.attn, self.conv, self.residual, self.whole_heads

    @property
    def method(self) -> Method:
        """The method of these options, with padded heads for `auto`. Raises BadInput for contradictory options."""
        return _method(
            method_of(self.preset),
            **self._replaced,
            mlp_sparsity=self.mlp,
            attention_sparsity=self.attn,
            conv_sparsity=self.conv,
            residual_sparsity=self.residual,
            heads_sparsity=self.whole_heads,
            geometry="padded" if self.heads == "auto" else self.heads,
            align_hidden=self.align.get("mlp"),
            align_head=self.align.get("head"),
            align_conv=self.align.get("conv"),
            aligned=self.align != ALIGN and "mlp" in self.align,
            ridge_rel=RIDGE_OF_BEST if self.ridge is None and method_of(self.preset) == "best" else self.ridge,
            rescales=self.rescale,
            rotates=self.rotate,
        )

    def by_kind(self, name: Literal["select", "repair"]) -> Mapping[str, str]:
        """Return the words of `select` or `repair` by kind of site, an empty mapping if the option is None."""
        return self.values[name] or {}

    @property
    def _replaced(self) -> dict[str, str | None]:
        """The parts of the preset that options replace, by the names of Method's fields; None keeps a part."""
        select, repair = self.by_kind("select"), self.by_kind("repair")
        return {
            "mlp_selection": select.get("mlp", select.get(CHANNELS)),
            "qk_selection": select.get("head"),
            "conv_selection": select.get("conv", select.get(CHANNELS)),
            "heads_selection": select.get("heads"),
            "mlp_recovery": repair.get("mlp", repair.get(CHANNELS)),
            "conv_recovery": repair.get("conv", repair.get(CHANNELS)),
            "heads_recovery": repair.get("heads"),
            "qk_recovery": self.qk,
        }

    @property
    def of_preset(self) -> tuple[Axis, str]:
        """The table of presets and the options that each honours, and the name of this preset's row in the table.

        A preset with replaced parts gets an additional row, since other options have an effect with it.
        """
        name = method_of(self.preset)
        changed = {field: value for field, value in self._replaced.items() if value is not None}
        if not changed:
            return PRESET, name
        typed = self.command_options
        words = " ".join([f"{name} with", *words_of({each: typed.get(each) for each in ("select", "repair", "qk")})])
        way = preset_way(words, _method(name, **changed))
        return replace(PRESET, variants={**PRESET.variants, words: way}), words


def _method(preset: str, **changes: Any) -> Method:
    try:
        return method_from_preset(preset, **changes)
    except ValueError as error:
        raise BadInput(str(error)) from None


EXPECTED = "2:4 for all sites, or mlp=2:4,head=2:4,conv=2:4, any of which may be left out"


def sparsities_from_text(text: str) -> dict[SparseKind, Sparsity]:
    """Parse a pattern for all kinds of sites (2:4), or some by kind (mlp=2:4); raise BadInput for other texts."""
    if "=" not in text:
        return dict.fromkeys(KINDS, sparsity_from_text(text))
    words = [part.strip().partition("=") for part in text.split(",")]
    given = {name: pattern for name, _, pattern in reversed(words)}
    by_kind = {kind: sparsity_from_text(given[kind]) for kind in KINDS if kind in given}
    if len(by_kind) != len(words):
        raise BadInput(f"{text[:80]!r}: expected {EXPECTED}, each once")
    return by_kind


PATTERNS = ParsedText(
    span="2:4|mlp=2:4,head=2:4,conv=2:4",
    expected=f"a text that is not empty, {EXPECTED}",
    kind=dict,
    read=sparsities_from_text,
)


@dataclass(frozen=True, kw_only=True)
class SparseChoice(Record, heading="Sparse weights"):
    """The options of the last step of a reduction, which sets weights to zero in a K:N pattern."""

    sparse: str | Mapping[SparseKind, Sparsity] | None = option(
        PATTERNS,
        help="As the last step, keep 2 of every 4 neighbouring weights in the layers of sites and refit them by "
        "least squares, alone or on reduced widths; also by kind of site. Only 2:4 has kernels (build "
        "--sparse), which TensorRT uses where they are faster; other K:N are for analysis. Default: none.",
    )
    sparse_pattern: Rule = option(
        default=DEFAULT_RULE,
        help="Which weights are kept: obs, in SparseGPT's order by the exact cost of dropping them; cast, by "
        "CAST's cost of each group by itself; magnitude, the largest.",
    )
    sparse_permute: Permute = option(
        default=DEFAULT_PERMUTE,
        help="First permute the inputs of each site's last layer, by reordering the rows of the previous layer "
        "(inside), and also the residual stream of a plain ViT with a classifier (stream): nothing is "
        "permuted at run time.",
    )

    @property
    def patterns(self) -> Mapping[SparseKind, Sparsity]:
        """The sparsity patterns by kind of site, an empty mapping without sparse weights."""
        assert not isinstance(self.sparse, str), self.sparse
        return self.sparse or {}
