"""Methods: what to remove and how to repair it, sparsities, alignment, and the published presets. PURE.

A width is rounded to its alignment and the result is reported beside the width asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from corp_deploy.spec.widths import HeadGeometry

MlpRanking = Literal[
    "obs", "combined", "energy", "magnitude", "active", "variance", "wanda", "producer-l1", "producer-l2"
]
MlpSelection = MlpRanking | Literal["fold"]
ConvRepair = Literal["none", "bias", "gram", "affine", "im2col"]
ConvRecoveryName = Literal["keep"] | ConvRepair
ChannelRecoveryName = Literal["none", "bias", "gram", "affine", "affine-v1", "refit"]
QkRanking = Literal["energy", "magnitude"]
QkRecoveryName = Literal["keep", "select", "logit", "logit-v1", "lowrank"]
HeadsRanking = Literal["obs", "grail", "magnitude", "fold"]
HeadsRepair = Literal["none", "gram", "affine"]
HeadsRecoveryName = Literal["keep"] | HeadsRepair
ValueRecoveryName = Literal["keep", "lowrank"]
LoopName = Literal["asymmetric", "symmetric"]

MLP_RANKINGS: tuple[str, ...] = get_args(MlpRanking)
QK_RANKINGS: tuple[str, ...] = get_args(QkRanking)
QK_RECOVERIES: tuple[str, ...] = get_args(QkRecoveryName)
MLP_REPAIRS: tuple[str, ...] = get_args(ChannelRecoveryName)
CONV_REPAIRS: tuple[str, ...] = get_args(ConvRepair)
HEADS_REPAIRS: tuple[str, ...] = get_args(HeadsRepair)
CHANNEL_REPAIRS: tuple[str, ...] = ("none", "bias", "gram", "affine")
HEADS_RANKINGS: tuple[str, ...] = get_args(HeadsRanking)
LOOPS: tuple[LoopName, ...] = get_args(LoopName)
NOT_HELD_OUT: Mapping[LoopName, str] = {
    "asymmetric": "the closed loop holds out some of its own images",
    "symmetric": "its sites meet the reduced model's activations, which held-out moments are not of",
}
RESCALED = (
    "--rescale: the asymmetric closed loop already fits convolutions' outputs; give --closed-loop symmetric or none"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """The selections, recoveries, sparsities and alignments of a reduction.

    Sparsities are shares removed, in [0, 1); with 0 the method runs on these sites at full width, with None it leaves
    them alone. Widths are multiples of the alignments `align_*`, in channels or dimensions; unless `aligned`, a site
    may demand a larger multiple or a small MLP have a finer one. `mlp_swaps`: exchanges follow an elimination (see
    swap.py). `empties`: whether a budget may replace a site by a constant. `rescales`: convolutions get the dense ones'
    means and variances afterwards (see rescaling.py). `rotates`: reduced heads are rotated to even out the ranges of
    their channels, with the same results (see rotation.py). `heads_sparsity`: the share of whole heads, which are
    removed before dimensions of the others; methods with `heads_recovery` keep can't remove any.

    With geometry `square` the values are reduced to the width of the queries and keys, by `value_recovery`; the other
    geometries leave values alone.
    """

    mlp_selection: MlpSelection
    mlp_recovery: ChannelRecoveryName
    qk_recovery: QkRecoveryName
    qk_selection: QkRanking = "energy"
    value_recovery: ValueRecoveryName = "keep"
    conv_selection: MlpRanking = "obs"
    conv_recovery: ConvRecoveryName = "keep"
    heads_selection: HeadsRanking = "grail"
    heads_recovery: HeadsRecoveryName = "keep"
    mlp_sparsity: float | None = None
    attention_sparsity: float | None = None
    conv_sparsity: float | None = None
    residual_sparsity: float | None = None
    heads_sparsity: float | None = None
    rescales: bool = False
    rotates: bool = False
    mlp_swaps: bool = True
    empties: bool = True
    geometry: HeadGeometry = "padded"
    align_hidden: int = 64
    aligned: bool = False
    align_head: int = 16
    align_conv: int = 32
    ridge_rel: float = 1e-4

    def __post_init__(self) -> None:
        sparsities = {
            "mlp": self.mlp_sparsity,
            "attention": self.attention_sparsity,
            "conv": self.conv_sparsity,
            "residual": self.residual_sparsity,
            "whole heads": self.heads_sparsity,
        }
        for name, value in sparsities.items():
            if value is not None and not 0.0 <= value < 1.0:
                raise ValueError(f"{name} sparsity {value}: expected a share removed in [0, 1)")
        if min(self.align_hidden, self.align_head, self.align_conv) < 1:
            widths = f"hidden {self.align_hidden}, head {self.align_head}, conv {self.align_conv}"
            raise ValueError(f"alignment: got {widths}, expected at least 1")
        reasons = {
            f"ridge: got {self.ridge_rel}, expected a positive share of the mean diagonal": not self.ridge_rel > 0.0,
            "this preset takes no whole heads away; expected another than corp-v1 and vbp": (
                self.heads_sparsity is not None and self.heads_recovery == "keep"
            ),
            "no moment describes merged heads, so their dimensions can't be chosen; leave --attn out, or rank heads: "
            "--select heads=obs": self.folds_heads and self.attention_sparsity,
            f"folding merges channels, which recovery {self.mlp_recovery!r} can't repair": (
                self.merges and self.mlp_recovery not in ("gram", "refit")
            ),
            "preset fold merges channels and ranks none; rank with another preset": (
                self.mlp_recovery == "refit" and not self.merges
            ),
            f"dimensions of heads can't be ranked by {self.qk_selection}: this preset ranks none (queries and keys: "
            f"{self.qk_recovery}); expected preset corp, corp-v1 or none": (
                self.qk_selection != "energy" and self.qk_recovery in ("keep", "lowrank")
            ),
            "square heads need the values reduced too, but this preset keeps them; expected preset best, or heads "
            "padded or ragged": self.geometry == "square" and self.reduces_attention and self.value_recovery == "keep",
        }
        for reason, holds in reasons.items():
            if holds:
                raise ValueError(reason)

    @property
    def attention_kept(self) -> float:
        """The share of the head dimensions that stay."""
        return 1.0 - (self.attention_sparsity or 0.0)

    @property
    def heads_kept(self) -> float:
        """The share of the heads that stay."""
        return 1.0 - (self.heads_sparsity or 0.0)

    def heads_left(self, heads: int) -> int:
        """Return how many of `heads` stay: the nearest whole number, at least one."""
        return max(int(heads * self.heads_kept + 0.5), 1)

    @property
    def asks_to_remove(self) -> bool:
        """True if any sparsity is more than 0."""
        of_linear = self.mlp_sparsity or self.attention_sparsity or self.heads_sparsity
        return bool(of_linear or self.conv_sparsity or self.residual_sparsity)

    @property
    def reduces_attention(self) -> bool:
        """True if attention sites go through the method at all."""
        return self.attention_sparsity is not None and self.qk_recovery != "keep"

    @property
    def has_curves(self) -> bool:
        """True if selections and recoveries give a site's loss at every width from one elimination, for a budget."""
        exact = self.mlp_recovery == "affine" and self.conv_recovery in ("keep", "im2col")
        return self.mlp_selection == "obs" and exact and self.qk_recovery == "lowrank"

    @property
    def merges(self) -> bool:
        """True if MLP channels are merged; the fit then needs images, as moments don't describe merged channels."""
        return self.mlp_selection == "fold"

    @property
    def folds_heads(self) -> bool:
        """True if whole heads are merged; the fit then needs images too."""
        return self.heads_selection == "fold" and self.heads_sparsity is not None

    @property
    def needs_attention_system(self) -> bool:
        """True if the method uses CORP's per-image system (eq. 15), which calibration sums only on request."""
        return self.qk_recovery == "logit" and self.reduces_attention


def _preset(
    mlp: tuple[MlpSelection, ChannelRecoveryName],
    qk: QkRecoveryName,
    conv: tuple[MlpRanking, ConvRecoveryName] = ("obs", "keep"),
    heads: tuple[HeadsRanking, HeadsRecoveryName] = ("grail", "keep"),
) -> Method:
    """Return a method by selection and recovery of MLPs, queries and keys, convolutions, and whole heads."""
    return Method(
        mlp_selection=mlp[0],
        mlp_recovery=mlp[1],
        qk_recovery=qk,
        conv_selection=conv[0],
        conv_recovery=conv[1],
        heads_selection=heads[0],
        heads_recovery=heads[1],
    )


_BEST = _preset(("obs", "affine"), "lowrank", ("obs", "im2col"), ("obs", "affine"))
PRESETS: Mapping[str, Method] = {
    "best": replace(_BEST, value_recovery="lowrank", rotates=True),
    "corp": _preset(("combined", "affine"), "logit", ("combined", "affine"), ("grail", "affine")),
    "corp-v1": _preset(("energy", "affine-v1"), "logit-v1"),
    "grail": _preset(("wanda", "gram"), "keep", ("wanda", "gram"), ("grail", "gram")),
    "grail-fold": _preset(("fold", "gram"), "keep", heads=("fold", "gram")),
    "fold": _preset(("fold", "refit"), "keep", heads=("fold", "affine")),
    "vbp": _preset(("variance", "bias"), "keep", ("variance", "bias")),
    "none": _preset(("combined", "none"), "select", ("combined", "none"), ("grail", "none")),
}


def loop_from(value: "bool | LoopName | Literal['none'] | None") -> LoopName | None:
    """Return the name of a closed loop: True is the asymmetric one; False, none and None are no loop."""
    if value is True:
        return "asymmetric"
    return value if value and value != "none" else None


def method_from_preset(preset: str, **changes: Any) -> Method:
    """Return the preset with the given fields set; None keeps the preset's value."""
    return replace(PRESETS[preset], **{name: value for name, value in changes.items() if value is not None})
