"""The table [export] of a recipe as a type. Imports no torch."""

from ground.errors import BadInput
from ground.precision import MIXED, QUANTISED, precision_named

from . import recipe_values
from .recipe_table import Table


class ExportTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    precisions: recipe_values.Precisions = ("fp32", "fp16")
    keep_fp32: recipe_values.Texts = ()
    input: recipe_values.GraphInput = "float32"
    rest: recipe_values.Rest | None = None
    scales: recipe_values.Scales | None = None
    balance: recipe_values.Flag | None = None
    keep_rest: recipe_values.Texts = ()
    weight_bits: recipe_values.WeightBits | None = None
    range_samples: recipe_values.Images | None = None
    break_fusion: recipe_values.Texts = ()

    @property
    def quantised(self) -> tuple[str, ...]:
        """The precisions whose ranges are taken of images."""
        return tuple(name for name in self.precisions if name in QUANTISED)

    @property
    def resting_on(self) -> str:
        """The precision of what isn't quantised."""
        return self.rest or ("fp16" if "fp16" in self.precisions else "fp32")

    def _refuse_idle_ranges(self) -> None:
        asked = {
            "rest": self.rest,
            "scales": self.scales,
            "balance": self.balance,
            "keep_rest": self.keep_rest or None,
            "range_samples": self.range_samples,
            "weight_bits": self.weight_bits,
        }
        idle = [name for name, value in asked.items() if value is not None]
        if idle and not self.quantised:
            raise BadInput(f"export.{idle[0]} is for precisions int8 and fp8, which export.precisions does not have")
        if self.weight_bits is not None and "int8" not in self.precisions:
            raise BadInput("export.weight_bits is for precision int8, which export.precisions does not have")
        if self.quantised and self.resting_on not in self.precisions:
            raise BadInput(
                f"export.precisions has {self.quantised[0]}, which rests on {self.resting_on} and is shipped only "
                f"where it is measured to be faster than that; add {self.resting_on!r} to export.precisions, or choose "
                "export.rest"
            )

    def __post_init__(self) -> None:
        self._refuse_idle_ranges()
        mixed = [name for name in self.precisions if name in MIXED]
        if self.keep_fp32 and not mixed:
            raise BadInput(
                f"export.keep_fp32 is for precision {' or '.join(MIXED)}, which export.precisions does not have"
            )
        if mixed and not self.keep_fp32:
            pure = precision_named(mixed[0]).pure
            raise BadInput(
                f"precision {mixed[0]} needs export.keep_fp32, such as ['blocks.7.attn']; else choose {pure}"
            )
