"""The baseline of a gate: older records of bench and verify, which rules compare with. Imports no torch."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from corp_deploy.invocation.option import Record, option
from corp_deploy.invocation.values import FILE
from ground.errors import BadInput
from ground.files import replacing, sha256_of_file

if TYPE_CHECKING:
    from perf.gate.gate import Gate
    from perf.gate.rule import Rule


@dataclass(frozen=True, kw_only=True)
class Baseline(Record, heading="Baseline"):
    """The paths of the baseline's records, whose files need not exist if `init` is set."""

    path: Path | None = option(FILE, typed="baseline", help="The older bench.json that `baseline` in a rule means.")
    parity: Path | None = option(
        FILE,
        typed="baseline_parity",
        help="The older parity.json that `baseline` means in rules on its figures, on the same inputs.",
    )
    init: bool = option(
        default=False,
        typed="init_baseline",
        help="If the gate passes, copy the judged records to the baselines that don't exist yet.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init and not self.by_kind:
            raise BadInput("--init-baseline needs --baseline FILE, which is where the baseline goes")

    @property
    def by_kind(self) -> dict[str, Path]:
        every = {"bench": self.path, "parity": self.parity}
        return {kind: path for kind, path in every.items() if path is not None}

    def require(self, rules: "Sequence[Rule]" = ()) -> None:
        """Raise BadInput for a rule that needs a baseline without a path, and for a path without such a record.

        With `init` the file may be absent.
        """
        from perf.parity.parity import load_parity
        from perf.record.runs import load_bench

        loads: dict[str, Callable[[Path], object]] = {"bench": load_bench, "parity": load_parity}
        for kind, path in self.by_kind.items():
            if path.is_file():
                loads[kind](path)
            elif not self.init:
                raise BadInput(
                    f"{path}: no such baseline; give an older {kind}.json, or --init-baseline to start with this one"
                )
        for rule in rules:
            kind, option = ("bench", "--baseline") if rule.is_of_bench else ("parity", "--baseline-parity")
            if rule.wants_baseline and kind not in self.by_kind:
                raise BadInput(f"rule {rule.text!r} needs {option} FILE, at first with --init-baseline")

    def older(self, own: Mapping[str, Path]) -> dict[str, Path]:
        """Return the paths of the baseline's existing records by kind ("bench", "parity").

        With `init`, a record with the bytes of the judged record in `own` is left out: this gate's first run copied it.
        """
        older = {kind: path for kind, path in self.by_kind.items() if path.is_file()}
        if self.init:
            digests = {kind: sha256_of_file(path) for kind, path in own.items() if path.is_file()}
            older = {kind: path for kind, path in older.items() if sha256_of_file(path) != digests.get(kind)}
        return older

    def start(self, own: Mapping[str, Path], *, exit_code: int) -> dict[Path, Path]:
        """Copy the judged records `own` to absent baselines, if `init` and the gate passed; return them by new path."""
        if not self.init or exit_code:
            return {}
        started = {path: own[kind] for kind, path in self.by_kind.items() if kind in own and not path.exists()}
        for path, record in started.items():
            with replacing(path) as temporary:
                shutil.copyfile(record, temporary)
        return started

    def unwritten(self, own: Mapping[str, Path], gate: "Gate") -> list[str]:
        """Return a sentence for each baseline that `start` has not written because the gate didn't pass."""
        causes = [f"{row.rule}: {row.message}" for row in gate.rules if row.verdict == gate.verdict]
        return [
            f"{path}: baseline not written, because the gate is {gate.verdict} ({causes[0]}); the first record that "
            "passes becomes it: measure again, or correct the rule"
            for kind, path in self.by_kind.items()
            if self.init and kind in own and not path.exists()
        ]
