"""What to remove and how to repair it: sparsities, alignment, and the published presets. PURE.

A width is rounded to its alignment and the result is reported beside what was asked.
"""

from dataclasses import dataclass, replace
from typing import Literal

MlpSelection = Literal["energy", "magnitude", "combined", "obs"]
MlpRecoveryName = Literal["none", "bias", "affine"]
QkRecoveryName = Literal["select", "logit", "lowrank"]
HeadGeometry = Literal["padded", "ragged"]

MIN_WIDTH = 8
DEFAULT_RIDGE_REL = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """One way to reduce a model. Sparsities are shares removed, in [0, 1); alignments are in channels or dimensions."""

    mlp_selection: MlpSelection
    mlp_recovery: MlpRecoveryName
    qk_recovery: QkRecoveryName
    mlp_sparsity: float = 0.0
    attention_sparsity: float = 0.0
    geometry: HeadGeometry = "padded"
    align_hidden: int = 64
    align_head: int = 16
    ridge_rel: float = DEFAULT_RIDGE_REL

    def __post_init__(self) -> None:
        for name, value in (("mlp", self.mlp_sparsity), ("attention", self.attention_sparsity)):
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name} sparsity {value}: expected a share removed in [0, 1)")
        if min(self.align_hidden, self.align_head) < 1:
            raise ValueError(f"alignment must be at least 1, got hidden {self.align_hidden}, head {self.align_head}")
        if not self.ridge_rel > 0.0:
            raise ValueError(f"ridge {self.ridge_rel}: expected a positive share of the mean diagonal")


PRESETS: dict[str, Choices] = {
    "best": Choices(mlp_selection="obs", mlp_recovery="affine", qk_recovery="lowrank"),
    "corp": Choices(mlp_selection="combined", mlp_recovery="affine", qk_recovery="logit"),
    "none": Choices(mlp_selection="combined", mlp_recovery="none", qk_recovery="select"),
}


def choices_from_preset(preset: str, **changes: object) -> Choices:
    """The preset with the given fields set; a field given as None keeps the preset's value."""
    return replace(PRESETS[preset], **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]


def needs_attention_system(choices: Choices) -> bool:
    """Whether the choices use CORP's per-image system (eq. 15), which calibration takes only when asked."""
    return choices.qk_recovery == "logit" and choices.attention_sparsity > 0.0


def aligned_width(dense: int, sparsity: float, align: int) -> int:
    """The width kept: dense * (1 - sparsity) to the nearest multiple of `align`, at least 8, never above dense.

    Nothing removed stays as it is. A site narrower than its alignment is aligned to 8 instead.
    """
    if sparsity == 0.0:
        return dense
    step = align if dense >= align else MIN_WIDTH
    nearest = int(dense * (1.0 - sparsity) / step + 0.5) * step
    return min(dense, max(nearest, step, MIN_WIDTH))
