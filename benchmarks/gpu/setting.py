"""The device and the models of a run; `small` runs the same code on tiny models in seconds."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from corp_deploy.spec.widths import HeadGeometry
from perf.runners.module import Precision

MODELS = {
    "DeiT-T": "deit_tiny_patch16_224",
    "DeiT-S": "deit_small_patch16_224",
    "DeiT-B": "deit_base_patch16_224",
    "DeiT-L": "deit3_large_patch16_224",
    "DeiT-H": "deit3_huge_patch14_224",
}
GEOMETRIES: tuple[HeadGeometry, ...] = ("padded", "square", "ragged")
TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
ALIGN_HIDDEN, ALIGN_HEAD = 64, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Device, size and directories of a run.

    `cache` has files that the run keeps, `packed` real weights (benchmarks/real/packed.py), `engines` plans.
    """

    device: str
    small: bool
    cache: Path = Path("build/gpu")
    packed: Path = Path("build/packed")
    engines: Path = Path("build/engines")

    @property
    def models(self) -> dict[str, str]:
        return {"DeiT-T": MODELS["DeiT-T"], "DeiT-H": MODELS["DeiT-H"]} if self.small else MODELS

    @property
    def kwargs(self) -> dict[str, Any]:
        """Return the arguments of timm's models."""
        return dict(TINY, num_classes=24) if self.small else {}

    @property
    def image_size(self) -> int:
        return 32 if self.small else 224

    @property
    def align_hidden(self) -> int:
        return 16 if self.small else ALIGN_HIDDEN

    @property
    def precision(self) -> Precision:
        """Return the precision of latency: FP16 on a GPU."""
        return "fp16" if self.device == "cuda" else "fp32"

    def as_json(self) -> dict[str, Any]:
        """Return the values that all rows of one record share."""
        told = {key: value for key, value in asdict(self).items() if key not in ("cache", "packed", "engines")}
        return told | {"align_hidden": self.align_hidden, "align_head": ALIGN_HEAD, "precision": self.precision}
