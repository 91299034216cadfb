"""What a sweep says of every model it tried: what it costs, how far it is from the dense model, how fast it is; and
which of them no other one beats. PURE.
"""

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
    """How far one of several outputs is from the dense one."""

    name: str
    relative_error: float
    agreement: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedAtBatch:
    """A reduced model beside the dense one at one batch size, interleaved in one process; times in milliseconds.

    `speedup` is dense over reduced; `noise` that of the dense model over itself. `disturbed`: other programs had the
    machine.
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
    """An engine built of the reduced model: size in bytes, attentions that run as one fused kernel (None: unknown)."""

    backend: str
    targets: tuple[str, ...]
    plan_bytes: int
    kernels: int | None
    attention_sites: int
    fused_attention: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One reduced model of a sweep: `macs_share` of the dense MACs stay; errors are against the dense
    outputs. No agreement: too few inputs for embeddings to have neighbours.

    `knobs`: what is done otherwise than the preset says, by option. `images`: of the calibration. `sites_reduced`
    became smaller; `sites_refused` were asked to and can't. Of several outputs error and agreement are those of the
    worst, and `outputs` has each. `accuracy` and `top5` are shares of the labelled inputs. `on_front`: no other trial
    has fewer MACs at less error; `fronts`: batch sizes at which none is faster and agrees more (errs less, where there
    is no agreement; is more accurate, where there are labels). `size_bytes`: of what was timed. `effort`: what each
    step took in this trial; what trials share, such as an elimination, is the first one's. `gap`: the shares of their
    output that sites lose on images that they are fitted to and on others, where groups of images tell it.
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
        """The error of each output, where there are several."""
        return ", ".join(f"{each.name} {each.relative_error:.4f}" for each in self.outputs)

    @property
    def describe(self) -> str:
        """What was asked for, in short."""
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
    """The dense model of a sweep, on the same inputs."""

    macs: int
    parameters: int
    inputs: int
    accuracy: float | None = None
    top5: float | None = None


def speed_of_row(row: SummaryRow, dense: str, reduced: str) -> SpeedAtBatch:
    """One batch size of a bench record, as a sweep keeps it."""
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
        disturbed=row.disturbed,
        message=other.message or one.message or "",
    )


def front(points: Sequence[tuple[float, ...]]) -> set[int]:
    """Positions of those that no other one beats: as good in every value, which are to be small, and better in one."""

    def beaten(own: tuple[float, ...]) -> bool:
        return any(all(a <= b for a, b in zip(other, own, strict=True)) and other != own for other in points)

    return {place for place, own in enumerate(points) if not beaten(own)}


def _lacking(point: SweepPoint) -> tuple[float, ...]:
    """How far from the dense model: small is good."""
    agreement = point.relative_error if point.agreement is None else 1.0 - point.agreement
    return (agreement,) if point.accuracy is None else (agreement, 1.0 - point.accuracy)


def with_fronts(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """Marked where they are the best of least MACs and error, and at every batch size of least time and lack.

    Time is that of the dense model over the speed-up, which is paired: medians of trials measured minutes apart differ
    by the machine's own drift.
    """
    by_macs = front([(point.macs, point.relative_error) for point in points])
    marked = [replace(point, on_front=place in by_macs, fronts=()) for place, point in enumerate(points)]
    for batch in batches_of(points):
        timed = [
            (place, (1.0 / speed.speedup.value, *_lacking(point)))
            for place, point in enumerate(points)
            if (speed := point.speed_at(batch)) is not None and speed.speedup is not None
        ]
        for position in front([values for _, values in timed]):
            place, _ = timed[position]
            marked[place] = replace(marked[place], fronts=(*marked[place].fronts, batch))
    return marked


def batches_of(points: Sequence[SweepPoint]) -> tuple[int, ...]:
    """Batch sizes at which any was measured."""
    return tuple(dict.fromkeys(speed.batch for point in points for speed in point.speeds))


def require_agreeing(points: Sequence[SweepPoint], least: float) -> list[SweepPoint]:
    """The trials whose agreement is at least `least`. Raises BadInput when there is none."""
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
    """The trial of least MACs whose top-1 agreement is at least `least`. Raises BadInput when there is none."""
    return min(require_agreeing(points, least), key=lambda point: (point.macs, point.relative_error))


def fastest_that_agrees(points: Sequence[SweepPoint], least: float) -> dict[int, SweepPoint]:
    """By batch size the trial of largest speed-up among those that agree so much. Raises BadInput when none does."""
    best = dict[int, tuple[float, SweepPoint]]()
    for point in require_agreeing(points, least):
        for speed in point.speeds:
            gain = 0.0 if speed.speedup is None else speed.speedup.value
            if gain > (best[speed.batch][0] if speed.batch in best else 0.0):
                best[speed.batch] = gain, point
    return {batch: point for batch, (_, point) in best.items()}


def smallest_by_error(points: Sequence[SweepPoint]) -> dict[float, SweepPoint]:
    """For round errors the trial of least MACs that errs no more; of errors with the same trial the least alone."""
    smallest: dict[float, SweepPoint] = {}
    for error in ERRORS:
        holding = [point for point in points if point.relative_error <= error]
        best = min(holding, key=lambda point: (point.macs, point.relative_error), default=None)
        if best is not None and best not in smallest.values():
            smallest[error] = best
    return smallest


def sentence_of_sweep(points: Sequence[SweepPoint]) -> str:
    """What of the MACs which error takes, by the trials themselves: nothing is read in between them."""
    smallest = smallest_by_error(points)
    if not smallest:
        least = min(points, key=lambda point: point.relative_error)
        by_output = f" ({least.by_output})" if least.outputs else ""
        return (
            f"no model tried errs {ERRORS[-1]:.0%} or less; the least is {least.relative_error:.1%}{by_output} at "
            f"{least.macs_share:.2f} of the MACs"
        )
    by_error = ", ".join(
        f"{point.macs_share:.2f} at {error:.0%}{f' ({point.by_output})' if point.outputs else ''}"
        for error, point in smallest.items()
    )
    of_worst = " of the worst output" if points[0].outputs else ""
    return (
        f"share of the MACs that an error{of_worst} takes, the smallest model tried for each: {by_error}; the edge "
        "between two is found by reduce --within 'error 0.05'"
    )


def record_of_sweep(
    points: Sequence[SweepPoint],
    answer: SweepPoint | None,
    dense: DensePoint | None = None,
    fitted: FittedInputs | None = None,
) -> dict[str, Any]:
    """The sweep as JSON values; `fitted`: how many of its inputs the models were fitted to, where that is known."""
    return {
        "kind": KIND,
        "version": VERSION,
        "dense": None if dense is None else asdict(dense),
        "fitted": None if fitted is None else asdict(fitted),
        "trials": [point.as_json() for point in points],
        "smallest_that_agrees": None if answer is None else answer.as_json(),
        "smallest_by_error": [
            {"error": error, "macs_share": point.macs_share, "relative_error": point.relative_error}
            for error, point in smallest_by_error(points).items()
        ],
    }
