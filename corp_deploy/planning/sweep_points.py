"""The points of a sweep: cost, error and speed of every model, Pareto fronts, best points, and the sweep's record."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ground.effort import Effort
from ground.errors import BadInput
from ground.records import json_from_record
from perf.record.runs import FittedInputs
from perf.stats.stats import Interval
from perf.stats.summary import SummaryRow

KIND, VERSION = "corp-deploy/sweep", 3
ERRORS = (0.01, 0.02, 0.05, 0.1, 0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputScore:
    """The error and the agreement of one of several outputs, against the dense model's."""

    name: str
    relative_error: float
    agreement: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedAtBatch:
    """A reduced model's speed against the dense one's at one batch size, interleaved in one process.

    `speedup` is dense over reduced latency; `noise` is the same ratio for the dense model against itself. `disturbed`
    is true if other programs used the machine or it was throttled.
    """

    batch: int
    p50_ms: Interval | None
    p90_ms: float | None
    images_per_s: Interval | None
    dense_p50_ms: Interval | None
    dense_p90_ms: float | None
    dense_images_per_s: Interval | None
    speedup: Interval | None
    noise: Interval | None
    disturbed: bool
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """The figures of a reduced model's engine; `fused_attention` counts fused attentions (None: unknown)."""

    backend: str
    targets: tuple[str, ...]
    plan_bytes: int
    kernels: int | None
    attention_sites: int
    fused_attention: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One reduced model of a sweep.

    `macs_share` of the dense MACs remain; errors are against the dense outputs. `agreement` is None if embeddings have
    too few inputs for neighbours. With several outputs, error and agreement are those of the worst, and `outputs` has
    each. `accuracy` and `top5` are shares of the labelled inputs.

    `knobs` are the options that differ from the preset, and `images` counts the calibration images. `sites_reduced`
    became smaller; `sites_refused` should have and can't. `on_front` is true if the trial is on the Pareto front of
    MACs and error; `fronts` are the batch sizes at which it is on the front of time and disagreement, see mark_fronts.
    `size_bytes` is that of the timed file. `effort` is the time of each step; work that trials share counts in the
    first. `gap` are the shares of their output that sites lose on images of the fit and on others.
    """

    preset: str
    mlp_sparsity: float
    attention_sparsity: float
    conv_sparsity: float
    geometry: str
    budget: float | None
    macs: int
    macs_share: float
    parameters: int
    relative_error: float
    agreement: float | None
    accuracy: float | None
    sites_reduced: int
    sites_refused: int
    top5: float | None = None
    on_front: bool = False
    knobs: Mapping[str, str] = field(default_factory=dict)
    images: int | None = None
    outputs: tuple[OutputScore, ...] = ()
    speeds: tuple[SpeedAtBatch, ...] = ()
    fronts: tuple[int, ...] = ()
    size_bytes: int | None = None
    engine: EngineFigures | None = None
    effort: Mapping[str, Effort] = field(default_factory=dict)
    gap: tuple[float, float] | None = None

    @property
    def by_output(self) -> str:
        """The relative error of each output as text, empty for a single output."""
        return ", ".join(f"{each.name} {each.relative_error:.4f}" for each in self.outputs)

    @property
    def describe(self) -> str:
        """The preset, its changed options, and the budget or the sparsities in words."""
        knobs = "".join(f" {name} {value}" for name, value in self.knobs.items())
        if self.budget is not None:
            return f"{self.preset}{knobs}, {self.budget:g} of the MACs"
        shares = {"MLP": self.mlp_sparsity, "Q/K": self.attention_sparsity, "conv": self.conv_sparsity}
        sparsities = ", ".join(f"{part} {share:g}" for part, share in shares.items() if share)
        return f"{self.preset}{knobs}{f', {sparsities} removed' if sparsities else ''}"

    def speed_at(self, batch: int) -> SpeedAtBatch | None:
        return next((speed for speed in self.speeds if speed.batch == batch), None)

    def as_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = json_from_record(self)
        if not self.outputs:
            del fields["outputs"]
        return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class DensePoint:
    """The dense model's costs, the number of judging inputs, and its accuracies on them, None without labels."""

    macs: int
    parameters: int
    inputs: int
    accuracy: float | None = None
    top5: float | None = None


def speed_from_row(row: SummaryRow, dense: str, reduced: str) -> SpeedAtBatch:
    """Return the speeds at the batch size of a bench summary's row, in which models have these names."""
    one, other = row.sides[dense], row.sides[reduced]
    return SpeedAtBatch(
        batch=row.batch,
        p50_ms=other.p50_ms,
        p90_ms=None if other.p90_ms is None else other.p90_ms.value,
        images_per_s=other.throughput,
        dense_p50_ms=one.p50_ms,
        dense_p90_ms=None if one.p90_ms is None else one.p90_ms.value,
        dense_images_per_s=one.throughput,
        speedup=row.speedup,
        noise=row.noise,
        disturbed=row.doubt is not None,
        message=other.message or one.message or "",
    )


def find_front(points: Sequence[tuple[float, ...]]) -> set[int]:
    """Return the positions of the Pareto front: points than which none is smaller in one value and larger in none."""

    def beaten(own: tuple[float, ...]) -> bool:
        return any(all(a <= b for a, b in zip(other, own, strict=True)) and other != own for other in points)

    return {place for place, own in enumerate(points) if not beaten(own)}


def _disagreement(point: SweepPoint) -> tuple[float, ...]:
    """Return 1 - agreement (or the error, if there is no agreement), and with labels the share of wrong classes."""
    agreement = point.relative_error if point.agreement is None else 1.0 - point.agreement
    return (agreement,) if point.accuracy is None else (agreement, 1.0 - point.accuracy)


def mark_fronts(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """Mark the points on the fronts of MACs and error, and of time and disagreement at every batch size.

    Without agreement the error takes the place of disagreement; labels add the share of wrong classes.

    Time is 1 over the speed-up, which is paired: medians of trials measured minutes apart differ by the machine's
    drift.
    """
    by_macs = find_front([(point.macs, point.relative_error) for point in points])
    marked = [replace(point, on_front=place in by_macs, fronts=()) for place, point in enumerate(points)]
    for batch in batches_of(points):
        timed = [
            (place, (1.0 / speed.speedup.value, *_disagreement(point)))
            for place, point in enumerate(points)
            if (speed := point.speed_at(batch)) is not None and speed.speedup is not None
        ]
        for position in find_front([values for _, values in timed]):
            place, _ = timed[position]
            marked[place] = replace(marked[place], fronts=(*marked[place].fronts, batch))
    return marked


def batches_of(points: Sequence[SweepPoint]) -> tuple[int, ...]:
    """Return the batch sizes at which any point was measured."""
    return tuple(dict.fromkeys(speed.batch for point in points for speed in point.speeds))


def require_agreeing(points: Sequence[SweepPoint], least: float) -> list[SweepPoint]:
    """Return the points whose agreement is at least `least`; raise BadInput if there is none."""
    judged = [(point.agreement, point) for point in points if point.agreement is not None]
    if not judged:
        raise BadInput(
            "--min-agreement: too few inputs for embeddings to have neighbours, so none can agree; give more"
        )
    agreement, best = max(judged, key=lambda pair: pair[0])
    if agreement < least:
        raise BadInput(
            f"no trial agrees on {least:.2%} of the images, the best reaches {agreement:.2%} "
            f"({best.preset}, {best.macs_share:.2f} of the MACs); sweep lower sparsities or lower --min-agreement"
        )
    return [point for agreement, point in judged if agreement >= least]


def smallest_that_agrees(points: Sequence[SweepPoint], least: float) -> SweepPoint:
    """Return the point of fewest MACs whose agreement is at least `least`; raise BadInput if there is none."""
    return min(require_agreeing(points, least), key=lambda point: (point.macs, point.relative_error))


def fastest_that_agrees(points: Sequence[SweepPoint], least: float) -> dict[int, SweepPoint]:
    """Return, by batch size, the point of largest speed-up that agrees so much; raise BadInput if none does."""
    best = dict[int, tuple[float, SweepPoint]]()
    for point in require_agreeing(points, least):
        for speed in point.speeds:
            gain = 0.0 if speed.speedup is None else speed.speedup.value
            if gain > (best[speed.batch][0] if speed.batch in best else 0.0):
                best[speed.batch] = gain, point
    return {batch: point for batch, (_, point) in best.items()}


def smallest_by_error(points: Sequence[SweepPoint]) -> dict[float, SweepPoint]:
    """Map each of ERRORS to the point of fewest MACs that errs no more; a point appears at its smallest error only."""
    smallest: dict[float, SweepPoint] = {}
    for error in ERRORS:
        holding = [point for point in points if point.relative_error <= error]
        best = min(holding, key=lambda point: (point.macs, point.relative_error), default=None)
        if best is not None and best not in smallest.values():
            smallest[error] = best
    return smallest


def describe_sweep(points: Sequence[SweepPoint]) -> str:
    """Describe the smallest trial within each of ERRORS by its share of the MACs, without interpolation."""
    smallest = smallest_by_error(points)
    if not smallest:
        least = min(points, key=lambda point: point.relative_error)
        by_output = f" ({least.by_output})" if least.outputs else ""
        return (
            f"no trial has an error of {ERRORS[-1]:.0%} or less; the smallest is {least.relative_error:.1%}{by_output} "
            f"at {least.macs_share:.2f} of the MACs"
        )
    by_error = ", ".join(
        f"{point.macs_share:.2f} at {error:.0%}{f' ({point.by_output})' if point.outputs else ''}"
        for error, point in smallest.items()
    )
    of_worst = " of the worst output" if points[0].outputs else ""
    return (
        f"share of the MACs of the smallest model tried within each error{of_worst}: {by_error}; reduce --within "
        "'error 0.05' searches between them"
    )


def build_sweep_record(
    points: Sequence[SweepPoint], answer: SweepPoint | None, dense: DensePoint, fitted: FittedInputs | None
) -> dict[str, Any]:
    """Build the record of a sweep; `fitted` is the number of its inputs that the models were fitted to, if known."""
    return {
        "kind": KIND,
        "version": VERSION,
        "dense": asdict(dense),
        "fitted": None if fitted is None else asdict(fitted),
        "trials": [point.as_json() for point in points],
        "smallest_that_agrees": None if answer is None else answer.as_json(),
        "smallest_by_error": [
            {"error": error, "macs_share": point.macs_share, "relative_error": point.relative_error}
            for error, point in smallest_by_error(points).items()
        ],
    }
