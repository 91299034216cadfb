"""Options of a budget: a cost to keep, or a limit on the loss. No torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from corp_deploy.spec.class_labels import LABELS_HELP
from ground.errors import BadInput
from ground.quantity import BATCH, SHARE, SHARE_KEPT, Real, quoted

from .option import Labels, PathLike, Record, option
from .values import DIRECTORY, FILE_OR_VALUES, PATH, ParsedText

CALIBRATE, BUDGET, CLOSED_LOOP, EXAMPLE_IMAGES = 2, 2, 6, 512
"""What they cost in bare forward passes over so many images, rounded; with fewer, solving weighs more. A test holds
these to benchmarks/results/passes.json.
"""


def cost(passes: int) -> str:
    return f"about {passes} bare passes over {EXAMPLE_IMAGES} images"


MOST_CUT = 0.85
"""Each site keeps a seventh: who asks for more wants a smaller model, or a budget that fits what can be cut."""
MACS = 0.7
"""The share that is kept where nobody says how much."""
Currency = Literal["macs", "params", "latency"]
Measure = Literal["error", "agreement", "accuracy"]
# Outputs of nothing but zeros have an error of 1: a larger one asks for nothing. So do the other ends left open.
BOUNDS: dict[Measure, Real] = {
    "error": Real(low=0.0, high=1.0, low_open=True, high_open=True),
    "agreement": Real(low=0.0, high=1.0, low_open=True, noun="a share"),
    "accuracy": Real(low=-100.0, high=0.0, low_open=True, noun="a change in points"),
}
EXPECTED = "'error 0.05' (largest relative error), 'agreement 0.98' (least share) or 'accuracy -0.5' (points lost)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A largest relative error, a least agreement with the dense model, or a least change of accuracy in points.

    Raises BadInput for a value that every model or none could meet.
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
    """Raises BadInput for anything else than a measure and a number that means something."""
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
    """A share of the dense cost to keep in one currency, or what may be lost; tables and batch are of latency's.

    Raises BadInput for several budgets, and for one of latency without a place for its tables.
    """

    macs: float | None = option(
        SHARE_KEPT, help=f"Share of the dense MACs to keep: widths differ by site; {cost(BUDGET)}."
    )
    params: float | None = option(SHARE_KEPT, help="Share of the dense parameters to keep, likewise.")
    latency: float | None = option(SHARE_KEPT, help="Share of the dense latency to keep, on this machine.")
    most_cut: float = option(
        SHARE,
        MOST_CUT,
        help="Refuse a budget of MACs or parameters that takes more than this share of every site that it may cut, "
        "evenly: little of such a model can be cut (see inspect), and what can would be cut too far to repair.",
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
        FILE_OR_VALUES, in_recipe=False, help=f"{LABELS_HELP} Of those that judge, for --within accuracy."
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
            raise BadInput(f"--labels say nothing of '{self.limit}'; they are for --within 'accuracy -0.5'")

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
        """Whether widths are allocated by site: to a budget, or to what may be lost."""
        return self.currency is not None or self.within is not None

    @property
    def widths(self) -> str:
        return "within" if self.within is not None else self.currency or "sparsities"
