"""The operations on a recipe: plan it, run it, run single stages, write a script of stages. Imports no torch."""

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ground.errors import EXIT_MISSING, BadInput, Missing
from ground.files import write_text
from ground.outputs import require_writable
from perf.gate.gate import Gate
from perf.gate.verdicts import load_gate
from perf.parity.parity import load_parity
from perf.stats.releases import add_release

from . import incremental
from .baseline import Baseline
from .incremental import Outcome, Stage, StageStatus
from .names import GATE, PARITY, SCRIPT, SUMS, own_records
from .proven import proof_of_directory
from .recipe import Recipe
from .recipe_checks import require_inputs
from .recipe_toml import rendered
from .signature import sums_from_file, unsign
from .signer import Signer, sign
from .stage import stage_call
from .stages import stages_of

Signature = Literal["signed", "kept", "removed", "refused"]
"""New; there already and valid; removed, as files changed or the gate failed; not made, as the gate failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """The result of a run, with the gate's record and reasons for doubt (`warnings`).

    `gate` is None while stages wait for another machine; `signature` is None if no signature was made or removed, and
    no signer is given.
    """

    outcome: Outcome
    gate: Gate | None = None
    warnings: tuple[str, ...] = ()
    signature: Signature | None = None

    @property
    def verdict(self) -> str | None:
        return None if self.gate is None else self.gate.verdict

    @property
    def exit_code(self) -> int:
        """The gate's exit code, EXIT_MISSING while stages wait for another machine."""
        return EXIT_MISSING if self.gate is None else self.gate.exit_code


def _names_like(patterns: Sequence[str], stages: Sequence[Stage], option: str) -> set[str]:
    """Return the names of stages that match patterns such as bench.*; raise BadInput for a pattern without a match."""
    names = [stage.name for stage in stages]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise BadInput(f"{option} {pattern}: no such stage; there are {', '.join(sorted(names))}")
    return {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A recipe and the directory `root` that it is carried out in.

    `plan`, `release`, `run_only` and `write_script` raise BadInput for wrong inputs before any stage runs. The caller
    holds the lock of the directory, except for `plan`.
    """

    recipe: Recipe
    path: Path
    """The recipe's file."""
    root: Path
    baseline: Baseline
    warn: Callable[[str], None] = lambda sentence: None
    """A function called, before any stage runs, with warnings on the inputs, such as too few images for a limit."""
    planned: Callable[[Sequence[StageStatus]], None] = lambda statuses: None
    """A function called with the states of all stages before the first stage runs."""
    starts: Callable[[Stage, str], None] = lambda stage, why: None
    """A function called with each stage that starts, and the reason why it runs."""
    signer: Signer | None = None
    again: Sequence[str] = ()
    """Patterns of stages that run although they are done."""

    def _stages(self) -> list[Stage]:
        stages = stages_of(self.recipe, self.root, self.baseline)
        again = _names_like(self.again, stages, "--again")
        return [replace(stage, again=True) if stage.name in again else stage for stage in stages]

    def _required(self, stages: Sequence[Stage]) -> list[StageStatus]:
        return require_inputs(self.recipe, self.root, stages, self.baseline, path=self.path, warn=self.warn)

    def plan(self) -> list[StageStatus]:
        return self._required(self._stages())

    def _plan_to_write(self, stages: Sequence[Stage]) -> list[StageStatus]:
        """Return the stages' states; raise BadInput if an output of a stage that is not done can't be written."""
        statuses = self._required(stages)
        for stage, status in zip(stages, statuses, strict=True):
            for name in stage.outputs if status.state != "cached" else ():
                require_writable(self.root / name, folder=name.endswith("/"))
        if self.recipe.gate.history is not None:
            require_writable(self.recipe.gate.history, folder=True)
        return statuses

    def release(self) -> Released:
        stages = self._stages()
        self.planned(self._plan_to_write(stages))
        if self.signer is not None:
            if self.recipe.release.version is None:
                raise BadInput(
                    "release.version is missing: a signature covers name and version, so that no older release passes "
                    'for a newer one; write version = "1.0.0" under [release]'
                )
            self.signer.require()
        self.root.mkdir(parents=True, exist_ok=True)
        outcome = self._run_all(stages)
        if outcome.blocked:
            if outcome.finished:
                unsign(self.root)
            return Released(outcome=outcome, warnings=tuple(f"{name}: {why}" for name, why in outcome.blocked.items()))
        gate, own = load_gate(self.root / GATE), own_records(self.recipe, self.root)
        if self.recipe.gate.history is not None:
            add_release(self.recipe.gate.history, own["bench"], own["parity"])
        self.baseline.start(own, exit_code=gate.exit_code)
        signature = self._signature(passed=gate.exit_code == 0, changed=bool(outcome.finished))
        warnings = (*self.baseline.unwritten(own, gate), *self._doubts())
        return Released(outcome=outcome, gate=gate, warnings=warnings, signature=signature)

    def _doubts(self) -> Iterator[str]:
        yield from load_parity(self.root / PARITY).warnings
        proof = proof_of_directory(self.root)
        if proof.failed and self.recipe.package.name is not None and not self.recipe.package.allow_failed:
            yield proof.refusal(self.root, "allow_failed = true under [package]")

    def _run_all(self, stages: Sequence[Stage]) -> Outcome:
        """Run the stages before the gate and then, if none of these is blocked, the gate and the stages after it."""
        gate = next(index for index, stage in enumerate(stages) if stage.name == "gate")
        first = incremental.run_stages(stages[:gate], self.root, starts=self.starts)
        if first.blocked:
            return first
        rest = incremental.run_stages(stages[gate:], self.root, starts=self.starts, every=stages)
        finished, cached = (*first.finished, *rest.finished), (*first.cached, *rest.cached)
        return Outcome(finished=finished, cached=cached, blocked=rest.blocked)

    def _signature(self, *, passed: bool, changed: bool) -> Signature | None:
        """Sign a release that passed if there is a signer, else remove an outdated signature; return its state."""
        if self.signer is not None and passed:
            files = frozenset((*sums_from_file(self.root / SUMS), SUMS))
            return "signed" if sign(self.root, self.signer, files) else "kept"
        removed = (changed or not passed) and unsign(self.root)
        return "refused" if self.signer is not None else "removed" if removed else None

    def run_only(self, names: Sequence[str]) -> Outcome:
        """Run only the named stages; raise Missing if this machine can't run one."""
        stages = self._stages()
        named = _names_like(names, stages, "--only")
        chosen = [stage for stage in stages if stage.name in named]
        self._plan_to_write(chosen)
        outcome = incremental.run_stages(chosen, self.root, starts=self.starts)
        if outcome.blocked:
            raise Missing("; ".join(f"stage {name}: {why}" for name, why in outcome.blocked.items()))
        return outcome

    def write_script(self) -> tuple[Path, list[StageStatus]]:
        """Write remaining.sh with the stages that this machine can't run; return its path and these stages' states."""
        stages, root = self._stages(), self.root
        self._required(stages)
        root.mkdir(parents=True, exist_ok=True)
        incremental.run_stages(stages[:1], root, starts=self.starts)
        pairs = zip(stages, incremental.stage_statuses(stages, root), strict=True)
        elsewhere = [each for each in pairs if each[1].state != "cached" and each[0].missing() is not None]
        rows = [
            {
                "name": stage.name,
                "why": status.why,
                "words": (
                    *stage_call(stage.name, self.recipe).argv,
                    *(("--again", stage.name) if stage.again else ()),
                ),
            }
            for stage, status in elsewhere
        ]
        write_text(root / SCRIPT, rendered("remaining.sh", release=self.recipe.name, stages=rows))
        (root / SCRIPT).chmod(0o755)
        return root / SCRIPT, [status for _, status in elsewhere]
