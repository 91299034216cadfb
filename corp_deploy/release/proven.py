"""The verdicts of parity and gate records in a directory, which `package` reads before it packs. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perf.gate.gate import PARITY as OF_PARITY
from perf.gate.gate import Gate
from perf.gate.verdicts import load_gate
from perf.parity.parity import load_parity

from .names import GATE, PARITY, PARITY_OF_TARGET

NO_PARITY = "no parity.json: nothing shows that the model's answers agree with the dense model's; run `verify`"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofVerdicts:
    """Lines with the verdict of each parity and gate record of a directory, by the record's name."""

    lines: dict[str, str]

    def _with(self, *verdicts: str) -> list[str]:
        return [f"{name}: {line}" for name, line in self.lines.items() if line.split()[0].rstrip(":") in verdicts]

    @property
    def failed(self) -> list[str]:
        return self._with("FAIL")

    @property
    def undecided(self) -> list[str]:
        """The lines of records that neither passed nor failed, and a line if there is no parity record."""
        undecided = self._with("INCONCLUSIVE", "NOT-COMPARABLE", "UNJUDGED")
        return undecided if any(name.startswith("parity") for name in self.lines) else [*undecided, NO_PARITY]

    def refusal(self, directory: Path, override: str) -> str:
        """Return the message that the directory is not packed, with the option `override` that packs it anyway."""
        failed = "; ".join(self.failed)
        return f"{directory}: not packed, because its proof failed: {failed}. {override} packs it all the same"


def _line_of_gate(gate: Gate) -> str:
    unmet = [rule for rule in gate.rules if rule.verdict == gate.verdict != "PASS"]
    told = [rule.rule if rule.metric == OF_PARITY else f"{rule.rule}: {rule.message}" for rule in unmet]
    return f"{gate.verdict}: {'; '.join(told)}" if told else gate.verdict


def _lines(directory: Path) -> Iterator[tuple[str, str]]:
    of_targets = sorted(directory.glob(f"{PARITY_OF_TARGET}*.json"))
    for path in dict.fromkeys((directory / PARITY, *of_targets)):
        if path.is_file():
            yield path.name, load_parity(path).line
    if (directory / GATE).is_file():
        yield GATE, _line_of_gate(load_gate(directory / GATE))


def proof_of_directory(directory: Path) -> ProofVerdicts:
    """Return the verdicts of a directory's parity and gate records. Raises BadInput for one that can't be read."""
    return ProofVerdicts(lines=dict(_lines(directory)))
