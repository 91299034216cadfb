"""What is done with the stages of a recipe: planned, run, run one by one, or written as a script. Imports no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ground.errors import BadInput, Missing
from ground.files import write_text
from perf.gate.verdicts import load_gate
from perf.record.history import add_release

from . import calls, incremental
from .baseline import Baseline
from .incremental import Outcome, Stage, StageStatus, locked
from .inputs import require_inputs
from .names import ATTESTATION, GATE, SCRIPT, SIGNATURE, SUMS
from .pipeline import own_records, stages_of
from .recipe import Recipe
from .rendering import rendered
from .signer import Signer, sign
from .sums import sums_from_file

StageListener = Callable[[Stage, str], None]
"""Hears each stage before it runs, and why it does."""
Warn = Callable[[str], None]
"""Hears, before any work, what the result will not be able to show."""


Signature = Literal["signed", "kept", "removed", "refused"]
"""Made, still that of these files, removed as it was of others, or not made, as the gate did not pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """What a run did and the gate's verdict; both gate fields are None while stages wait for another machine.
    `signature`: what became of it, None where none was and none was asked for.
    """

    outcome: Outcome
    verdict: str | None
    exit_code: int | None
    signature: Signature | None = None


def _unheard(stage: Stage, why: str) -> None:
    pass


def _unwarned(sentence: str) -> None:
    pass


def plan_release(
    recipe: Recipe, root: Path, baseline: Baseline, *, path: Path, warn: Warn = _unwarned
) -> list[StageStatus]:
    """What `release` would do now; writes nothing. Raises BadInput for what it would not even begin with."""
    return require_inputs(recipe, root, stages_of(recipe, root, baseline), baseline, path=path, warn=warn)


def _run_all(recipe: Recipe, root: Path, baseline: Baseline, starts: StageListener) -> Outcome:
    """In two parts: whether the baseline is this very record is known only when the bench stands."""
    stages = stages_of(recipe, root, baseline)
    gate = next(index for index, stage in enumerate(stages) if stage.name == "gate")
    first = incremental.run(stages[:gate], root, starts=starts, is_complete=False)
    if first.blocked:
        return first
    rest = incremental.run(stages_of(recipe, root, baseline), root, starts=starts)
    finished = (*first.finished, *rest.finished)
    cached = tuple(name for name in rest.cached if name not in finished)
    return Outcome(finished=finished, cached=cached, blocked=rest.blocked)


def _require_signer(recipe: Recipe, signer: Signer) -> None:
    """Raise BadInput before any work is done for what can't be signed, or not with this."""
    if recipe.release.version is None:
        raise BadInput(
            "release.version is missing: a signature covers name and version, so that no older release passes for "
            'a newer one; write version = "1.0.0" under [release]'
        )
    signer.require()


def _unsign(root: Path) -> bool:
    """Remove a signature, first of all; whether there was one."""
    there = (root / SIGNATURE).is_file()
    for name in (SIGNATURE, ATTESTATION):
        (root / name).unlink(missing_ok=True)
    return there


def _signature(root: Path, signer: Signer | None, *, passed: bool, changed: bool) -> Signature | None:
    """A release that passes its gate is signed where that was asked; a signature never outlives what it is of."""
    if signer is not None and passed:
        files = frozenset((*sums_from_file(root / SUMS), SUMS))
        return "signed" if sign(root, signer, files) else "kept"
    removed = _unsign(root) if changed or not passed else False
    if signer is not None:
        return "refused"
    return "removed" if removed else None


def release(
    recipe: Recipe,
    root: Path,
    baseline: Baseline,
    *,
    path: Path,
    warn: Warn = _unwarned,
    starts: StageListener = _unheard,
    planned: Callable[[Sequence[StageStatus]], None] = lambda statuses: None,
    signer: Signer | None = None,
) -> Released:
    """Run what is not done, and sign what passes; `path` is the recipe's file, `planned` hears what will be done first
    of all. Raises BadInput for what it names and will not do, before any work, and when another process works in the
    directory.
    """
    planned(require_inputs(recipe, root, stages_of(recipe, root, baseline), baseline, path=path, warn=warn))
    if signer is not None:
        _require_signer(recipe, signer)
    root.mkdir(parents=True, exist_ok=True)
    with locked(root):
        outcome = _run_all(recipe, root, baseline, starts)
        if outcome.blocked:
            if outcome.finished:
                _unsign(root)
            return Released(outcome=outcome, verdict=None, exit_code=None)
        gate = load_gate(root / GATE)
        own = own_records(recipe, root)
        if recipe.gate.history is not None and own.bench is not None:
            add_release(recipe.gate.history, own.bench)
        baseline.start(own, exit_code=gate.exit_code)
        signature = _signature(root, signer, passed=gate.exit_code == 0, changed=bool(outcome.finished))
    return Released(outcome=outcome, verdict=gate.verdict, exit_code=gate.exit_code, signature=signature)


def run_only(
    recipe: Recipe,
    root: Path,
    names: Sequence[str],
    baseline: Baseline,
    *,
    path: Path,
    warn: Warn = _unwarned,
    starts: StageListener = _unheard,
) -> Outcome:
    """The named stages alone, from what stands in the directory. Raises Missing when this machine can't run one."""
    stages = stages_of(recipe, root, baseline)
    stage_names = {stage.name for stage in stages}
    for name in names:
        if name not in stage_names:
            raise BadInput(f"--only {name}: no such stage; there are {', '.join(sorted(stage_names))}")
    chosen = [stage for stage in stages if stage.name in names]
    require_inputs(recipe, root, chosen, baseline, path=path, warn=warn)
    with locked(root):
        outcome = incremental.run(chosen, root, starts=starts, is_complete=False)
    if outcome.blocked:
        raise Missing("; ".join(f"stage {name}: {why}" for name, why in outcome.blocked.items()))
    return outcome


def write_script(
    recipe: Recipe, root: Path, baseline: Baseline, *, path: Path, warn: Warn = _unwarned
) -> tuple[Path, list[StageStatus]]:
    """remaining.sh: the stages that this machine can't run, for one that can, to be run in the same directory.

    Returns its path and the stages in it.
    """
    stages = stages_of(recipe, root, baseline)
    require_inputs(recipe, root, stages, baseline, path=path, warn=warn)
    root.mkdir(parents=True, exist_ok=True)
    with locked(root):
        incremental.run(stages[:1], root, starts=_unheard, is_complete=False)
        pairs = zip(stages, incremental.plan(stages, root), strict=True)
        elsewhere = [status for stage, status in pairs if status.state != "cached" and stage.missing() is not None]
        write_text(root / SCRIPT, _script(recipe, elsewhere))
        (root / SCRIPT).chmod(0o755)
    return root / SCRIPT, elsewhere


def _script(recipe: Recipe, statuses: Sequence[StageStatus]) -> str:
    rows = [
        {"name": status.stage, "why": status.why, "words": calls.only(status.stage, recipe).argv} for status in statuses
    ]
    return rendered("remaining.sh", release=recipe.name, stages=rows)
