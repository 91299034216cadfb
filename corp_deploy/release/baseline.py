"""The older records that rules compare with, and how records that pass become them. Imports no torch."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from corp_deploy.invocation.option import Record, option
from corp_deploy.invocation.values import FILE
from ground.errors import BadInput
from ground.files import replacing, sha256_of_file

if TYPE_CHECKING:
    from perf.gate.rule import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class OldRecords:
    """A bench record and a parity record, either of them or none."""

    bench: Path | None = None
    parity: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Baseline(Record, heading="Baseline"):
    """Where the older records are; whether they are such is looked at when they are used."""

    path: Path | None = option(FILE, typed="baseline", help="The older bench.json that `baseline` in a rule means.")
    parity: Path | None = option(
        FILE,
        typed="baseline_parity",
        help="The older parity.json that `baseline` means in rules on its figures, on the same inputs.",
    )
    init: bool = option(
        default=False,
        typed="init_baseline",
        help="Make the records that are judged the baselines if they pass and none is.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init and self.path is None and self.parity is None:
            raise BadInput("--init-baseline needs --baseline FILE, which is where the baseline goes")

    def require(self, rules: "Sequence[Rule]" = ()) -> None:
        """Raise BadInput when a baseline is named that is no such record, or is not there and may not be started, and
        when one of the rules asks for one that is not named.
        """
        for path, kind in ((self.path, "bench"), (self.parity, "parity")):
            if path is not None and not path.is_file() and not self.init:
                raise BadInput(
                    f"{path}: no such baseline; give an older {kind}.json, or --init-baseline to start with this one"
                )
        from perf.parity.parity import load_parity
        from perf.record.runs import load_bench

        if self.path is not None and self.path.is_file():
            load_bench(self.path)
        if self.parity is not None and self.parity.is_file():
            load_parity(self.parity)
        for rule in rules:
            option, named = ("--baseline", self.path) if rule.is_of_bench else ("--baseline-parity", self.parity)
            if rule.wants_baseline and named is None:
                raise BadInput(f"rule {rule.text!r} needs {option} FILE, at first with --init-baseline")

    def older(self, own: OldRecords) -> OldRecords:
        """The records to judge by: those that are there, without one that is `own`, the very record that started it."""
        return OldRecords(bench=self._older(self.path, own.bench), parity=self._older(self.parity, own.parity))

    def _older(self, path: Path | None, own: Path | None) -> Path | None:
        if path is None or not path.is_file():
            return None
        same = self.init and own is not None and own.is_file() and sha256_of_file(path) == sha256_of_file(own)
        return None if same else path

    def start(self, own: OldRecords, *, exit_code: int) -> dict[Path, Path]:
        """Make records that were judged the baseline, only those of a gate that passes, where there are none: by the
        baseline's path the record that is it now.
        """
        started = dict(self._missing(own)) if self.init and exit_code == 0 else {}
        for path, record in started.items():
            with replacing(path) as temporary:
                shutil.copyfile(record, temporary)
        return started

    def _missing(self, own: OldRecords) -> Iterator[tuple[Path, Path]]:
        for path, record in ((self.path, own.bench), (self.parity, own.parity)):
            if path is not None and record is not None and not path.exists():
                yield path, record
