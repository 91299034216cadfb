"""How well a decoder and what was made of it tell the next token of a text, sequence by sequence: nothing else is kept.

Logits of a whole text would be larger than any model; of each sequence three numbers stay.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from calib.fingerprints import Fingerprints
from calib.input_set import InputSet
from corp_deploy.families.family import input_ports, output_ports, sequence_spec
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.fitted import fitted_inputs
from ground.errors import BadInput
from ground.records import json_from_record
from perf.parity.perplexity import LanguageMeasures, OfSequence, Range, measures_of, of_sequence
from perf.record.fitted import FittedInputs
from perf.runners.module import ModuleRunner

from .candidates import Candidate, Run, outputs_at
from .link_rules import DENSE

KIND = "corp-deploy/perplexity"
Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "UNJUDGED"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageLimits:
    """What every candidate has to keep to: the largest ratio of perplexities, the least share of tokens that agree, the
    largest KL a token in nats; None for no limit.
    """

    max_ratio: float | None = None
    min_agreement: float | None = None
    max_kl: float | None = None

    def judged(self, row: LanguageMeasures) -> tuple[Verdict, str]:
        """By the 95 % interval of each: one that lies on both sides of its limit leaves the verdict open."""
        bounds = (
            ("perplexity ratio", row.ratio, self.max_ratio, False),
            ("token agreement", row.agreement, self.min_agreement, True),
            ("KL", row.kl, self.max_kl, False),
        )
        found = [_judged(what, each, limit, least) for what, each, limit, least in bounds if limit is not None]
        for verdict in ("FAIL", "INCONCLUSIVE", "PASS"):
            words = [why for own, why in found if own == verdict]
            if words:
                return verdict, "; ".join(words)
        return "UNJUDGED", "no limit was set"


def _judged(what: str, got: Range, limit: float, least: bool) -> tuple[Verdict, str]:
    word = "at least" if least else "at most"
    low, high = got.value if got.low is None else got.low, got.value if got.high is None else got.high
    shown = f"{what} {got.value:.4g} ({low:.4g} to {high:.4g}), {word} {limit:g}"
    if got.low is None or got.high is None:
        failed = got.value < limit if least else got.value > limit
        return "FAIL" if failed else "PASS", f"{shown}, of too few sequences for an interval"
    if (low >= limit) if least else (high <= limit):
        return "PASS", shown
    return ("FAIL" if (high < limit if least else low > limit) else "INCONCLUSIVE"), shown


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageProof:
    """The dense model first, then every candidate with its verdict and why; how many of the sequences any of them was
    fitted to, where that is known.
    """

    rows: tuple[LanguageMeasures, ...]
    verdicts: Mapping[str, tuple[Verdict, str]] = field(default_factory=dict)
    inputs: Mapping[str, Any]
    fitted: FittedInputs | None = None

    @property
    def verdict(self) -> Verdict:
        """The worst of all."""
        order: tuple[Verdict, ...] = ("FAIL", "INCONCLUSIVE", "PASS")
        own = {verdict for verdict, _ in self.verdicts.values()}
        return next((each for each in order if each in own), "UNJUDGED")

    def as_json(self) -> dict[str, Any]:
        """The record."""
        verdicts = {model: {"verdict": verdict, "why": why} for model, (verdict, why) in self.verdicts.items()}
        rows = [json_from_record(row) | verdicts.get(row.model, {}) for row in self.rows]
        fitted = {} if self.fitted is None else {"fitted": json_from_record(self.fitted)}
        return {"kind": KIND, "version": 1, "verdict": self.verdict, "inputs": dict(self.inputs), "rows": rows} | fitted


def perplexities(
    dense: Checkpoint,
    candidates: Sequence[Candidate],
    sequences: InputSet,
    limits: LanguageLimits,
    *,
    batch: int = 1,
    done: Callable[[int], None] | None = None,
) -> LanguageProof:
    """The dense decoder and every candidate on the same sequences. `done` hears how many sequences are finished.

    Raises BadInput for a model that is no decoder, and for a candidate of other outputs.
    """
    spec = sequence_spec(dense.model)
    if spec is None:
        raise BadInput("perplexity is of a decoder, which tells the next token; this model is none: verify compares it")
    ports = output_ports(dense.model)
    with ExitStack() as stack:
        runner = ModuleRunner(dense.model, inputs=input_ports(dense.model), outputs=ports, label=DENSE)
        runs: dict[str, Run] = {DENSE: stack.enter_context(runner)}
        for each in candidates:
            if each.label in runs:
                raise BadInput(f"{each.label} is named twice; name each candidate once")
            runs[each.label] = stack.enter_context(each.opened(ports))
        found = _found(runs, sequences, batch, ports[0].name, done)
    (tokens,) = spec.shape
    rows = tuple(measures_of(label, found[label], found[DENSE], tokens=tokens - 1) for label in runs)
    return LanguageProof(
        rows=rows,
        verdicts={row.model: limits.judged(row) for row in rows[1:]},
        inputs={"sequences": sequences.count, "digest": sequences.digest},
        fitted=fitted_inputs(
            Fingerprints(ids=sequences.ids), [each.fitted for each in candidates], noun=sequences.noun
        ),
    )


def _found(
    runs: Mapping[str, Run], sequences: InputSet, batch: int, output: str, done: Callable[[int], None] | None
) -> dict[str, list[OfSequence]]:
    found: dict[str, list[OfSequence]] = {label: [] for label in runs}
    finished = 0
    for inputs in sequences.batches(batch):
        assert not isinstance(inputs, Tensor), "sequences have a name"
        feeds = {name: tensor.numpy() for name, tensor in inputs.items()}
        (ids_BT,) = feeds.values()
        answers = {label: outputs_at(run, feeds, batch)[output] for label, run in runs.items()}
        for label, own in answers.items():
            found[label] += _rows(answers[DENSE], own, ids_BT)
        finished += len(ids_BT)
        if done is not None:
            done(finished)
    return found


def _rows(
    dense_BTV: NDArray[np.floating], own_BTV: NDArray[np.floating], ids_BT: NDArray[np.integer]
) -> list[OfSequence]:
    return [of_sequence(*each) for each in zip(dense_BTV, own_BTV, ids_BT, strict=True)]
