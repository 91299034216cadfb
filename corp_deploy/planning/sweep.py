"""Sweeps: many models from the same moments, each reduced, judged and timed against the dense one.

Each result of a trial is written at once (see sweep_trials), so that a stopped sweep continues.
Several processes share the trials; then the first process of every machine times those of its machine in turn.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from calib.distributed import Ranks
from calib.fingerprints import Fingerprints
from calib.inputs import InputSet
from calib.moments import Moments
from corp_deploy.algebra.obs import Elimination
from corp_deploy.families.counting import macs, parameters
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.invocation.running import SweepSpeedChoice
from corp_deploy.reduction.model import Reduction
from corp_deploy.store.checkpoint import Checkpoint, save
from corp_deploy.store.fitted import fitted_inputs
from corp_deploy.store.input_sets import model_digest
from ground.effort import Stopwatch, measure_effort
from ground.files import sha256_of_file
from perf.record.runs import FittedInputs
from perf.runners.protocol import build_stopwatch
from perf.timing.watch import package_version

from .budget_planner import BudgetPlanner, build_budget_planner
from .carried_out import carry_out
from .curves import compute_eliminations
from .judging import ScoredInputs, worst_agreement
from .request import ReductionRequest, WidthPlan, build_reduced_checkpoint
from .sweep_points import SweepPoint, mark_fronts
from .sweep_speed import SweepBench
from .sweep_trials import Scores, SweepRequest, TrialFolder, digest_of_values

TRIALS = "trials"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepContext:
    """The dense model, its moments as files and opened, the inputs that judge, and the calibration images.

    Methods that merge channels need the calibration images; without them, budgets are probed on the judging inputs.
    """

    dense: Checkpoint
    moments: tuple[Path, ...]
    statistics: tuple[Moments, ...]
    source: InputSet
    scored: ScoredInputs
    calibration: InputSet | None = None

    @property
    def fitted(self) -> FittedInputs | None:
        """The number of judging inputs that the models are fitted to, or None if the moments don't tell."""
        judging = Fingerprints.from_inputs(self.source.ids, self.scored.inputs)
        fingerprints = [each.fingerprints for each in self.statistics]
        fingerprints += [] if self.calibration is None else [Fingerprints(ids=self.calibration.ids)]
        return fitted_inputs(judging, fingerprints, noun=self.source.noun)

    @property
    def identity(self) -> dict[str, Any]:
        """The values, besides a trial's method, budget and moments, that decide its result; they name its folder."""
        labels = self.scored.labels_N
        return {
            "dense": model_digest(self.dense.model),
            "inputs": self.source.digest,
            "labels": None if labels is None else labels.tolist(),
            "calibration": None if self.calibration is None else self.calibration.digest,
            "batch_size": self.scored.batch_size,
            "version": package_version("corp-deploy"),
        }


@dataclass(slots=True)
class SweepCache:
    """Orders of removal by moments and ridge, for all widths, and planners by method and moments, for all budgets."""

    swept: SweepContext
    elimination_cache: dict[tuple[int, float], dict[str, Elimination]] = field(default_factory=dict)
    planners: dict[str, BudgetPlanner] = field(default_factory=dict)

    def _planned(self, request: SweepRequest, watch: Stopwatch | None) -> WidthPlan:
        method, at, known = request.method, (request.moments, request.method.ridge_rel), self.elimination_cache
        if request.budget is None:
            if method.mlp_selection == "obs" and at not in known:
                with measure_effort(watch, "select"):
                    known[at] = compute_eliminations(
                        self.swept.dense.model, self.swept.statistics[request.moments], method
                    )
            return WidthPlan(method=method, widths=None, decisions=(), eliminations=known.get(at, {}))
        key = digest_of_values(method=asdict(method), moments=request.moments)
        if key not in self.planners:
            moments, source = self.swept.statistics[request.moments], self.swept.calibration or self.swept.source
            asked = ReductionRequest(options=ReduceOptions(macs=request.budget), method=method)
            self.planners[key] = build_budget_planner(self.swept.dense, moments, asked, source, watch)
        return self.planners[key].tried_at(request.budget)

    def reduce(self, request: SweepRequest, watch: Stopwatch | None = None) -> tuple[Reduction, Checkpoint]:
        """Return the reduction of a request, and its checkpoint with the lineage."""
        with measure_effort(None if request.budget is None else watch, "plan"):
            planned = self._planned(request, watch)
        dense, images, moments = self.swept.dense, self.swept.calibration, self.swept.statistics[request.moments]
        reduction = carry_out(dense.model, planned, moments=moments, images=images, watch=watch)
        file = self.swept.moments[request.moments]
        return reduction, build_reduced_checkpoint(
            dense, reduction, planned, request.preset, moments, file, looked_at=(images,)
        )


def _point(swept: SweepContext, request: SweepRequest, reduced: Checkpoint, images: int) -> SweepPoint:
    method, scored = request.method, swept.scored
    answers, cost = scored.answers(reduced.model), macs(reduced.model)
    scores, (accuracy, top5) = scored.scores(answers), scored.accuracies(answers)
    sites = reduced.lineage["sweep_sites"]
    return SweepPoint(
        preset=request.preset,
        knobs=dict(request.knobs or {}),
        images=images,
        budget=request.budget,
        mlp_sparsity=method.mlp_sparsity or 0.0,
        attention_sparsity=method.attention_sparsity or 0.0,
        conv_sparsity=method.conv_sparsity or 0.0,
        geometry=method.geometry,
        macs=cost,
        macs_share=cost / macs(swept.dense.model),
        parameters=parameters(reduced.model),
        relative_error=max(score.relative_error for score in scores),
        agreement=worst_agreement(scores),
        accuracy=accuracy,
        top5=top5,
        sites_reduced=sites["reduced"],
        sites_refused=sites["refused"],
        outputs=scores if len(scores) > 1 else (),
        gap=tuple(gap) if (gap := sites.get("gap")) else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """The settings of a sweep's execution.

    `folder` holds the trials, `speed` the options of timing and engines, `ranks` are the processes that share the
    trials, and `keep_models` keeps the reduced models. `on_progress` receives a phase and its number of finished
    trials.
    """

    folder: Path
    speed: SweepSpeedChoice
    ranks: Ranks
    keep_models: bool
    command: tuple[str, ...]
    on_progress: Callable[[str, int], None]


def run_sweep(swept: SweepContext, requests: Sequence[SweepRequest], run: SweepRun) -> list[SweepPoint]:
    """Carry out every trial that isn't finished, and return the points of all, with their Pareto fronts marked.

    Raises BadInput if the moments are of another model, or a budget is out of reach.
    """
    with tempfile.TemporaryDirectory() as scratch:
        identity, digests, folders = swept.identity, [sha256_of_file(path) for path in swept.moments], []
        for each in requests:
            key = digest_of_values(
                **identity, method=asdict(each.method), budget=each.budget, moments=digests[each.moments]
            )
            folders.append(TrialFolder(path=run.folder / TRIALS / f"{each.slug}-{key[:8]}", key=key))
        bench = SweepBench(swept.dense, Path(scratch), run.speed, keep_plans=run.keep_models)
        _reduce_all(swept, requests, folders, bench, run)
        run.ranks.all_gather(None)  # no process times while another computes
        _time_all(folders, bench, run)
        # Machines need no common disk: each shares what it has read.
        every = run.ranks.all_gather(
            [_read_point(folder, bench, at) for folder, at in zip(folders, requests, strict=True)]
        )
        if not run.keep_models and run.ranks.rank == 0:
            for folder in folders:
                shutil.rmtree(folder.model, ignore_errors=True)
    found = [next(filter(None, column), None) for column in zip(*every, strict=True)]
    return mark_fronts([point for point in found if point is not None])


def _reduce_all(
    swept: SweepContext,
    requests: Sequence[SweepRequest],
    folders: Sequence[TrialFolder],
    bench: SweepBench,
    run: SweepRun,
) -> None:
    work = SweepCache(swept=swept)

    def finished(folder: TrialFolder) -> bool:
        scored, timed = folder.scores() is not None, not bench.wants_timing(folder)
        kept = not run.keep_models or folder.has_reduced()
        return scored and kept and not bench.wants_engine(folder) and (timed or folder.has_reduced())

    left = [place for place, folder in enumerate(folders) if not finished(folder)]
    # Every process reads the same list, and takes its share of it.
    everywhere = run.ranks.all_gather(left)
    shared = [place for place in everywhere[0] if all(place in one for one in everywhere)]
    run.on_progress("reducing", len(folders) - len(left))
    for count, place in enumerate(shared[run.ranks.rank :: run.ranks.size], start=1):
        _reduce_one(work, requests[place], folders[place], bench)
        run.on_progress("reducing", len(folders) - len(left) + count)


def _reduce_one(work: SweepCache, request: SweepRequest, folder: TrialFolder, bench: SweepBench) -> None:
    watch = build_stopwatch("cpu")
    reduced = folder.reduced() if folder.model.is_dir() else None
    if reduced is None:
        reduction, checkpoint = work.reduce(request, watch)
        coverage, gap = reduction.coverage, reduction.gap
        sites = {
            "reduced": len(coverage.reduced),
            "refused": len(coverage.refused),
            "gap": None if gap is None else [gap.share_fitted, gap.share_held_out],
        }
        about = {"sweep_trial": folder.key, "sweep_sites": sites}
        reduced = replace(checkpoint, lineage={**checkpoint.lineage, **about})
        save(reduced, folder.model)
    if folder.scores() is None:
        images = work.swept.statistics[request.moments].images
        with watch.measure("score"):
            point = _point(work.swept, request, reduced, images)
        folder.write(Scores(key=folder.key, point=replace(point, effort=watch.efforts)))
    if bench.wants_engine(folder):
        bench.build(folder, reduced)


def _time_all(folders: Sequence[TrialFolder], bench: SweepBench, run: SweepRun) -> None:
    """Time the trials of this machine.

    Of torchrun's machines that can read a trial's model, one times it. Only a machine's first process times, as several
    would disturb each other.
    """
    if run.speed.bench is None:
        return
    left = [place for place, folder in enumerate(folders) if bench.wants_timing(folder) and folder.has_reduced()]
    run.on_progress("timing", len(folders) - len(left))
    own, mine = int(os.environ.get("GROUP_RANK", "0")), []
    everywhere = run.ranks.all_gather((own, left))
    for place in left if os.environ.get("LOCAL_RANK", "0") == "0" else ():
        machines = sorted({machine for machine, places in everywhere if place in places})
        if machines[place % len(machines)] == own:
            mine.append(place)
    for count, place in enumerate(mine, start=1):
        bench.time(folders[place], command=run.command)
        run.on_progress("timing", len(folders) - len(left) + count)


def _read_point(folder: TrialFolder, bench: SweepBench, request: SweepRequest) -> SweepPoint | None:
    """Read a trial's point with its engine and speeds, or return None if this machine doesn't have its scores."""
    point = folder.scores()
    if point is None:
        return None
    built, timing, effort = bench.engine_of(folder), bench.timing_of(folder), dict(point.effort)
    if built is not None:
        effort["build"] = built.effort
        point = replace(point, engine=built.figures)
    if timing is not None:
        effort["bench"] = timing.effort
        point = replace(point, speeds=timing.speeds, size_bytes=timing.size_bytes)
    return replace(point, effort=effort, knobs=dict(request.knobs or {}))
