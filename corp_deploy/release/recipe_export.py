"""[export] of a recipe as a type. Imports no torch."""

from corp_deploy.invocation.export_choice import ExportOptions, QuantisedOptions
from corp_deploy.invocation.option import option, options_of
from ground.errors import BadInput
from ground.precision import QUANTISED
from ground.quantities import IMAGES

from .recipe_record import keys_alone, record_of, table_of

OPTIONS = options_of(ExportOptions, "precision", "keep_fp32", "graph_input") | options_of(QuantisedOptions)
OPTIONS |= options_of(ExportOptions, "break_fusion")
RANGES = keys_alone(
    range_samples=option(IMAGES, help="For int8 and fp8: how many calibration images ranges are computed from.")
)
UNSAID = dict.fromkeys(("rest", "scales", "balance", "weight_bits"))


class ExportTable(table_of(RANGES, OPTIONS, precisions=("fp32", "fp16"), **UNSAID)):  # type: ignore[misc]
    """`range_samples`: how many calibration images ranges are computed from."""

    @property
    def quantised(self) -> tuple[str, ...]:
        """The precisions whose ranges are computed from images."""
        return tuple(name for name in self.precisions if name in QUANTISED)

    @property
    def resting_on(self) -> str:
        """The precision of what isn't quantised."""
        return self.rest or ("fp16" if "fp16" in self.precisions else "fp32")

    @property
    def options(self) -> ExportOptions:
        """The same as `export` takes it."""
        return record_of(ExportOptions, self, "export", **({"rest": self.resting_on} if self.quantised else {}))

    def __post_init__(self) -> None:
        _ = self.options
        if self.range_samples is not None and not self.quantised:
            raise BadInput("export.range_samples is for precisions int8 and fp8, which export.precisions does not have")
        if self.quantised and self.resting_on not in self.precisions:
            raise BadInput(
                f"export.precisions has {self.quantised[0]}, which rests on {self.resting_on} and is shipped only "
                f"where it is measured to be faster than that; add {self.resting_on!r} to export.precisions, or choose "
                "export.rest"
            )
