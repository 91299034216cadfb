"""Perplexity of a dense decoder and its candidates, sequence by sequence.

Logits of a whole text would take more memory than the model, so three numbers are kept of each sequence.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from calib.fingerprints import Fingerprints
from calib.inputs import InputSet
from corp_deploy.families.family import input_ports, output_ports, sequence_spec
from corp_deploy.invocation.proof import LanguageOptions
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.fitted import fitted_inputs
from ground.errors import BadInput
from ground.records import json_from_record
from perf.parity.perplexity import (
    LEAST_SEQUENCES,
    LanguageMeasures,
    Range,
    SequenceMeasures,
    measure_language,
    measure_sequence,
)
from perf.record.runs import FittedInputs
from perf.runners.module import ModuleRunner
from perf.stats.decision import compared_with_limit, decide, samples_for_interval
from perf.stats.stats import DEFAULT_CONFIDENCE, Interval

from .candidates import Candidate, Run, run_in_batches
from .own_noise import DENSE

KIND = "corp-deploy/perplexity"
Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "UNJUDGED"]
ORDER: tuple[Verdict, ...] = ("FAIL", "INCONCLUSIVE", "PASS", "UNJUDGED")


class LanguageLimits(LanguageOptions):
    """Limits on every candidate, judged by intervals of this `confidence`."""

    def judged(self, row: LanguageMeasures) -> tuple[Verdict, str]:
        """Return the worst verdict of a candidate's limits and its reasons; an interval across one is INCONCLUSIVE."""
        every = (
            ("perplexity ratio", row.ratio, self.max_ratio, False),
            ("token agreement", row.agreement, self.min_agreement, True),
            ("KL", row.kl, self.max_kl, False),
        )
        verdicts = [
            self._judged(what, interval, limit, least, row.sequences)
            for what, interval, limit, least in every
            if limit is not None
        ]
        if not verdicts:
            return "UNJUDGED", "no limit was set"
        worst = min((verdict for verdict, _ in verdicts), key=ORDER.index)
        return worst, "; ".join(why for own, why in verdicts if own == worst)

    def _judged(self, what: str, measured: Range, limit: float, least: bool, sequences: int) -> tuple[Verdict, str]:
        def breaks(end: float) -> bool:
            return end < limit if least else end > limit

        if measured.low is None or measured.high is None:
            shown = f"{what} {measured.value:.4g}, limit {limit:g}"
            if not math.isfinite(measured.value):
                return "FAIL", shown
            return "INCONCLUSIVE", f"{shown}: {sequences} sequences are too few for an interval, give {LEAST_SEQUENCES}"
        interval = Interval(value=measured.value, low=measured.low, high=measured.high)
        words = f"{what} {compared_with_limit(interval, f'{limit:g}', self.confidence, '{:.4g}'.format)}"
        decision = decide(measured.low, measured.high, breaks)
        if decision != "INCONCLUSIVE":
            return decision, words
        gap = measured.value - limit
        width = measured.value - measured.low if gap > 0 else measured.high - measured.value
        return decision, f"{words}: {samples_for_interval(gap, width, sequences, 'sequences')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageProof:
    """The measures of the dense model and then of every candidate, with a verdict and its reason by candidate.

    `confidence` is that of every interval; `fitted` counts the sequences that any candidate was fitted to, if known.
    """

    rows: tuple[LanguageMeasures, ...]
    verdicts: Mapping[str, tuple[Verdict, str]] = field(default_factory=dict)
    inputs: Mapping[str, Any]
    confidence: float = DEFAULT_CONFIDENCE
    fitted: FittedInputs | None = None

    @property
    def verdict(self) -> Verdict:
        own = (verdict for verdict, _ in self.verdicts.values())
        return min(own, key=ORDER.index, default="UNJUDGED")

    def as_json(self) -> dict[str, Any]:
        verdicts = {model: {"verdict": verdict, "why": why} for model, (verdict, why) in self.verdicts.items()}
        rows = [json_from_record(row) | verdicts.get(row.model, {}) for row in self.rows]
        head = {"kind": KIND, "version": 1, "verdict": self.verdict, "confidence": self.confidence}
        fitted = {} if self.fitted is None else {"fitted": json_from_record(self.fitted)}
        return {**head, "inputs": dict(self.inputs), "rows": rows, **fitted}


def measure_perplexities(
    dense: Checkpoint,
    candidates: Sequence[Candidate],
    sequences: InputSet,
    limits: LanguageLimits,
    *,
    batch: int = 1,
    on_progress: Callable[[int], None] = lambda finished: None,
) -> LanguageProof:
    """Measure the dense decoder and every candidate on the same sequences.

    Candidates have distinct labels. `on_progress` receives the number of finished sequences. Raises BadInput if the
    model is not a decoder, or a candidate has other outputs.
    """
    spec = sequence_spec(dense.model)
    if spec is None:
        raise BadInput("this model is not a decoder, so it has no perplexity; compare it with verify")
    ports = output_ports(dense.model)
    with ExitStack() as stack:
        runner = ModuleRunner(dense.model, inputs=input_ports(dense.model), outputs=ports, label=DENSE)
        runs: dict[str, Run] = {DENSE: stack.enter_context(runner)}
        runs |= {each.label: stack.enter_context(each.opened(ports)) for each in candidates}
        found = _measure_sequences(runs, sequences, batch, ports[0].name, on_progress)
    (tokens,) = spec.shape
    rows = tuple(
        measure_language(label, found[label], found[DENSE], tokens=tokens - 1, confidence=limits.confidence)
        for label in runs
    )
    return LanguageProof(
        rows=rows,
        verdicts={row.model: limits.judged(row) for row in rows[1:]},
        inputs={"sequences": sequences.count, "digest": sequences.digest},
        confidence=limits.confidence,
        fitted=fitted_inputs(
            Fingerprints(ids=sequences.ids), [each.fitted for each in candidates], noun=sequences.noun
        ),
    )


def _measure_sequences(
    runs: Mapping[str, Run], sequences: InputSet, batch: int, output: str, on_progress: Callable[[int], None]
) -> dict[str, list[SequenceMeasures]]:
    found: dict[str, list[SequenceMeasures]] = {label: [] for label in runs}
    finished = 0
    for inputs in sequences.batches(batch):
        assert not isinstance(inputs, Tensor), "sequences have a name"
        feeds = {name: tensor.numpy() for name, tensor in inputs.items()}
        (ids_BT,) = feeds.values()
        answers = {label: run_in_batches(run, feeds, batch)[output] for label, run in runs.items()}
        for label, own_BTV in answers.items():
            found[label] += map(measure_sequence, answers[DENSE], own_BTV, ids_BT)
        finished += len(ids_BT)
        on_progress(finished)
    return found
