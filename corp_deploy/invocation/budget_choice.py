"""Options of a budget: a share of the cost to keep, or a limit on the loss. Imports no torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from corp_deploy.spec.class_labels import LABELS_HELP
from ground.errors import BadInput
from ground.quantity import BATCH, SHARE, SHARE_KEPT, Real, quoted

from .option import Labels, PathLike, Record, option
from .values import DIRECTORY, FILE_OR_VALUES, PATH, ParsedText

CALIBRATE, BUDGET, CLOSED_LOOP, EXAMPLE_IMAGES = 2, 2, 6, 512
"""The costs of a calibration, a budget and a closed loop, in bare forward passes over EXAMPLE_IMAGES images, rounded.

With fewer images, solving adds passes. A test compares the costs with benchmarks/results/passes.json.
"""


def cost(passes: int) -> str:
    return f"about {passes} bare passes over {EXAMPLE_IMAGES} images"


MOST_CUT = 0.85
"""The default of `most_cut`: a budget that keeps less than about a seventh of every prunable site is refused."""
MACS = 0.7
"""The share of the dense model's MACs that is kept by default."""
Currency = Literal["macs", "params", "latency"]
Measure = Literal["error", "agreement", "accuracy"]
# A model that outputs only zeros has an error of 1, so any model meets a larger limit; likewise at the other open ends.
BOUNDS: dict[Measure, Real] = {
    "error": Real(low=0.0, high=1.0, low_open=True, high_open=True),
    "agreement": Real(low=0.0, high=1.0, low_open=True, noun="a share"),
    "accuracy": Real(low=-100.0, high=0.0, low_open=True, noun="a change in points"),
}
EXPECTED = "'error 0.05' (largest relative error), 'agreement 0.98' (least share) or 'accuracy -0.5' (points lost)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit on a reduced model's loss: a relative error, an agreement with the dense model, or a change of accuracy.

    `value` is the largest error, the least agreement, or the least change in points (-0.5 allows half a point less).

    Raises BadInput for a value that every model meets, or that no model can meet.
    """

    measure: Measure
    value: float

    def __post_init__(self) -> None:
        bounds = BOUNDS[self.measure]
        if not bounds.holds(self.value):
            raise BadInput(f"'{self.measure} {self.value:.15g}': expected {self.measure} and {bounds}")

    def __str__(self) -> str:
        return f"{self.measure} {self.value:.15g}"

    def holds(self, value: float) -> bool:
        return value <= self.value if self.measure == "error" else value >= self.value

    def better(self, one: float, other: float) -> bool:
        return one < other if self.measure == "error" else one > other


def limit_from_text(text: str) -> Limit:
    """Parse a measure and a number, such as 'error 0.05'; raise BadInput for other texts."""
    words = text.split()
    measure = next((name for name in get_args(Measure) if len(words) == 2 and words[0] == name), None)
    if measure is None:
        raise BadInput(f"{quoted(text)}: expected {EXPECTED}")
    try:
        return Limit(measure=measure, value=Real(low=-100.0, high=100.0).from_text(words[1]))
    except BadInput:
        raise BadInput(f"{quoted(text)}: expected {measure} and {BOUNDS[measure]}, as in {EXPECTED}") from None


@dataclass(frozen=True, kw_only=True)
class BudgetChoice(Record, heading="Budget"):
    """A budget, as a share of the dense model's MACs, parameters or latency to keep, or a limit on the loss (`within`).

    Raises BadInput for more than one budget, for a budget beside a limit, for a latency budget without
    `latency_tables`, and for labels beside a limit on another measure than accuracy.
    """

    macs: float | None = option(
        SHARE_KEPT, help=f"Share of the dense MACs to keep: widths differ by site; {cost(BUDGET)}."
    )
    params: float | None = option(SHARE_KEPT, help="Share of the dense parameters to keep: widths differ by site.")
    latency: float | None = option(SHARE_KEPT, help="Share of the dense latency to keep, on this machine.")
    most_cut: float = option(
        SHARE,
        MOST_CUT,
        help="Refuse a budget of MACs or parameters that would remove more than this share of every prunable site, if "
        "spread evenly: where few layers are prunable (see inspect), they would be cut too far to repair.",
    )
    within: Limit | str | None = option(
        ParsedText(span="measure number", expected="a text that is not empty", kind=Limit, read=limit_from_text),
        help=f"The smallest model (with --latency-tables: the fastest) that stays within {EXPECTED}, by bisection over "
        "the budget: up to 7 reductions, each judged on images held out of the calibration.",
    )
    judge: PathLike | None = option(
        PATH,
        in_recipe=False,
        help="Other images (texts) that judge --within; default: those of --images (--text) that calibrate held out.",
    )
    labels: Labels | None = option(
        FILE_OR_VALUES, in_recipe=False, help=f"{LABELS_HELP} For the inputs that judge --within accuracy."
    )
    latency_tables: PathLike | None = option(DIRECTORY, help="Where --latency and --within keep latency tables.")
    batch: int | None = option(BATCH, help="Batch size for the latency; default 1.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self._shares) > 1:
            raise BadInput(f"--{' and --'.join(self._shares)} are several budgets; give one")
        if self.latency is not None and self.latency_tables is None:
            raise BadInput("--latency needs --latency-tables DIR, where the measured tables are kept")
        if self.limit is None:
            return
        if self.currency is not None:
            raise BadInput(f"--within chooses the budget itself; give it without --{self.currency}")
        if self.labels is not None and self.limit.measure != "accuracy":
            raise BadInput(f"--labels have no effect on '{self.limit}'; they are for --within 'accuracy -0.5'")

    @property
    def _shares(self) -> dict[Currency, float]:
        every: dict[Currency, float | None] = {"macs": self.macs, "params": self.params, "latency": self.latency}
        return {currency: share for currency, share in every.items() if share is not None}

    @property
    def limit(self) -> Limit | None:
        assert not isinstance(self.within, str), self.within
        return self.within

    @property
    def currency(self) -> Currency | None:
        return next(iter(self._shares), None)

    @property
    def share(self) -> float | None:
        return next(iter(self._shares.values()), None)

    @property
    def allocates(self) -> bool:
        """True if the widths of sites follow from a budget or a limit on the loss, not from shares to remove."""
        return self.currency is not None or self.within is not None

    @property
    def widths(self) -> str:
        return "within" if self.within is not None else self.currency or "sparsities"
