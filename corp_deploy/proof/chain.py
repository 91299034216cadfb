"""The parity chain: dense torch -> reduced torch -> ONNX FP32 -> FP16 or BF16 -> engine, on real inputs, by links."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calib.moments import Moments
from corp_deploy.families.family import input_ports, output_ports
from corp_deploy.reduction.moments import require_same_model
from corp_deploy.store.checkpoint import Checkpoint, fitted_inputs
from ground.errors import BadInput
from ground.feeds import Feeds, Outputs, checked_feeds, rows_of
from ground.ports import OutputPort
from ground.precision import FLOAT16, FloatType
from perf.parity.block_outputs import headroom
from perf.parity.labels import accuracy, mcnemar
from perf.parity.locate import FaultLocation
from perf.parity.measures import figures, require_agreement
from perf.parity.parity import Link, LinkKind, Parity
from perf.parity.structure import StructuralTest
from perf.record.fitted import FittedInputs
from perf.runners.module import ModuleRunner

from .candidates import Candidate, Run, of_model, outputs_at
from .heads import Heads, opened_heads
from .inputs import ProofInputs
from .int8_kernels import with_reasons
from .link_rules import DENSE, LinkRules, Merges, ParityLimits, Reference, link_rules, merges_of
from .locate import located, worst_inputs
from .shift import input_range, shift_of_inputs
from .structural_tests import structural_tests

HEADROOM_INPUTS = 8
EACH_SIZE = 4
"""Inputs at the batch sizes that are not the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The parity record, per-image figures for the file beside it, and of a chain every step's answers by label."""

    parity: Parity
    figures: dict[str, NDArray[np.generic]]
    answers: Mapping[str, Outputs] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A candidate that has been run: its answers by batch size, a link for each output, what was found about its
    structure, the block where a failing link breaks; of a torch model how it merges tokens, of a graph or engine how
    the one that it computes does.
    """

    candidate: Candidate
    by_batch: Mapping[int, Outputs]
    links: tuple[Link, ...]
    findings: tuple[StructuralTest, ...]
    merges: Merges | None
    located: FaultLocation | None = None

    @property
    def answers(self) -> Outputs:
        """Those to all inputs."""
        return self.by_batch[max(self.by_batch)]


def _by_batch(candidate: Candidate, run: Run, feeds: Feeds, batches: Sequence[int]) -> dict[int, Outputs]:
    """All inputs at the largest batch size; at every other one a batch of them, and no fewer than EACH_SIZE."""
    if candidate.batch:
        return {candidate.batch: outputs_at(run, feeds, candidate.batch)}
    largest = max(batches)
    few = {size: rows_of(feeds, slice(max(size, EACH_SIZE))) for size in sorted(set(batches)) if size != largest}
    by_batch = {size: outputs_at(run, some, size) for size, some in few.items()}
    return by_batch | {largest: outputs_at(run, feeds, largest)}


def _step(
    candidate: Candidate,
    before: Reference,
    proof_inputs: ProofInputs,
    batches: Sequence[int],
    rules: Sequence[LinkRules],
    heads: Heads,
    halves: Collection[FloatType],
) -> Step:
    bounds = [rule.rounding(candidate.float_type).max_relative_error for rule in rules]
    bound = max(each for each in bounds if each is not None)
    ports = [rule.port for rule in rules if rule.port not in heads.ports]
    with candidate.opened(ports) as backbone:
        run = heads.behind(backbone, max(batches))
        by_batch = _by_batch(candidate, run, proof_inputs.feeds, batches)
        merges = before.merges
        if candidate.checkpoint is not None:
            most = max(by_batch)
            own = candidate.checkpoint, proof_inputs.feeds, by_batch[most], most
            merges = merges_of(*own, halves=halves, heads=heads)
        findings = structural_tests(candidate, run, proof_inputs.feeds, by_batch, bound, merges)
    narrow: LinkKind = "quantised" if candidate.quantised else "half"
    kind: LinkKind = "reduced" if candidate.form == "torch" else narrow if candidate.rounds else "exact"

    def links_of(by_batch: Mapping[int, Outputs]) -> tuple[Link, ...]:
        return tuple(rule.link(candidate, candidate.name, kind, before, by_batch) for rule in rules)

    def links_as_typed() -> tuple[Link, ...]:
        with replace(candidate, as_typed=True).opened(ports) as backbone:
            run = heads.behind(backbone, max(batches))
            return links_of(_by_batch(candidate, run, proof_inputs.feeds, batches))

    links = with_reasons(links_of(by_batch), candidate, links_as_typed)
    return Step(candidate=candidate, by_batch=by_batch, links=links, findings=tuple(findings), merges=merges)


def _headroom(single: Candidate | None, fp16: Candidate, feeds: Feeds) -> list[StructuralTest]:
    """How near an FP16 graph comes to the end of float16, computed by the FP32 graph before it; nothing of others."""
    is_fp16 = fp16.float_type is FLOAT16 and fp16.runtime is None and fp16.form == "graph"
    if single is None or single.form != "graph" or not is_fp16:
        return []
    return [headroom(fp16.label, single.path, fp16.path, single.fed(rows_of(feeds, slice(HEADROOM_INPUTS))))]


def _halves(candidates: Sequence[Candidate]) -> tuple[FloatType, ...]:
    """The types of sixteen bits that candidates are held in."""
    return tuple(dict.fromkeys(each.float_type for each in candidates if each.rounds))


def _located(
    step: Step, before: Reference, previous: Candidate | None, dense: Checkpoint, feeds: Feeds, products: int
) -> FaultLocation | None:
    """Where the first failing output of a step breaks, where that can be told."""
    failing = next((each for each in step.links if each.status == "FAIL"), None)
    if failing is None:
        return None
    own = failing.output or next(iter(step.answers))
    worst = worst_inputs(feeds, before.answers[own], step.answers[own], failing.role)
    return located(failing.name, step.candidate, previous, dense, worst, products)


def _walk(
    dense: Checkpoint,
    candidates: Sequence[Candidate],
    proof_inputs: ProofInputs,
    batches: Sequence[int],
    rules: Sequence[LinkRules],
    heads: Heads,
    answers: Outputs,
    on_progress: Callable[[Sequence[Step]], None],
) -> list[Step]:
    """Every candidate against its reference: the dense model for torch, else the last FP32 step before it."""
    steps, halves = list[Step](), _halves(candidates)
    single: Step | None = None
    merges = merges_of(dense, proof_inputs.feeds, answers, max(batches), halves=halves, heads=heads)
    for candidate in candidates:
        if candidate.form == "torch" or single is None:
            before = Reference(label=DENSE, answers=answers, merges=None if candidate.form == "torch" else merges)
        else:
            before = Reference(label=single.candidate.label, answers=single.answers, merges=merges)
        previous = None if single is None else single.candidate
        step = _step(candidate, before, proof_inputs, batches, rules, heads, halves)
        room = _headroom(previous, candidate, proof_inputs.feeds)
        block = _located(step, before, previous, dense, proof_inputs.feeds, rules[0].products)
        step = replace(step, findings=(*step.findings, *room), located=block)
        merges = merges if candidate.checkpoint is None else step.merges
        single = single if candidate.rounds or candidate.runtime is not None else step
        steps.append(step)
        on_progress(steps)
    return steps


def prove(
    dense: Checkpoint,
    candidates: Sequence[Candidate],
    proof_inputs: ProofInputs,
    *,
    batches: Sequence[int],
    limits: ParityLimits,
    moments: Moments | None = None,
    on_progress: Callable[[int], None] | None = None,
    answered: Callable[[str, Outputs], None] | None = None,
) -> Proof:
    """Compare every candidate with its predecessor and the last one with the dense model.

    A torch candidate is held against the dense model and the user's limits; an FP32 graph against the torch model it
    came from and a float32 bound; an FP16 or BF16 graph or engine against the FP32 step before it and a multiple of the
    dense model's own error in that type. A failing graph's block is located. `moments` adds the shift check, the heads
    of `limits` links of the maps that they make of every step's outputs. `on_progress` is told how many candidates are
    finished, `answered` the label and the outputs of the dense model and of each candidate as soon as it is. Raises
    BadInput for inputs, labels, heads or limits that don't fit, and for moments of another model.
    """
    if moments is not None:
        require_same_model(dense.model, moments)
    inputs, ports = input_ports(dense.model), output_ports(dense.model)
    if limits.min_agreement is not None:
        for port in ports:
            require_agreement(port, proof_inputs.count)
    proof_inputs = replace(proof_inputs, feeds=checked_feeds(proof_inputs.feeds, inputs, where=f"inputs for {DENSE}"))
    candidates = of_model(candidates, dense)
    for candidate in candidates:
        candidate.require_feeds(proof_inputs.feeds)

    def finished(steps: Sequence[Step]) -> None:
        if answered is not None:
            answered(steps[-1].candidate.label, steps[-1].answers)
        if on_progress is not None:
            on_progress(len(steps))

    with opened_heads(limits.heads, ports, threshold=limits.map_threshold) as own_heads:
        with ModuleRunner(dense.model, inputs=inputs, outputs=ports, label=DENSE) as runner:
            answers = outputs_at(own_heads.behind(runner, max(batches)), proof_inputs.feeds, max(batches))
        if answered is not None:
            answered(DENSE, answers)
        rules = link_rules(dense, proof_inputs, answers, max(batches), limits, own_heads, _halves(candidates))
        steps = _walk(dense, candidates, proof_inputs, batches, rules, own_heads, answers, finished)
        records = own_heads.records
    by_label = {DENSE: answers} | {step.candidate.label: step.answers for step in steps}
    return Proof(
        parity=Parity(
            images=proof_inputs.images,
            links=(*(each for step in steps for each in step.links), *_whole(steps, answers, rules)),
            structure=(
                *(each for step in steps for each in step.findings),
                *(input_range(moments, proof_inputs.feeds) if moments is not None else ()),
            ),
            located=tuple(step.located for step in steps if step.located is not None),
            shift=None if moments is None else shift_of_inputs(dense, moments, proof_inputs.feeds),
            heads=records,
            fitted=_fitted(proof_inputs, candidates, moments),
            **_labelled(by_label, proof_inputs.labels, ports),
        ),
        figures=_figures(by_label, rules),
        answers=by_label,
    )


def _fitted(proof_inputs: ProofInputs, candidates: Sequence[Candidate], moments: Moments | None) -> FittedInputs | None:
    fingerprints = [candidate.fitted for candidate in candidates] + ([] if moments is None else [moments.fingerprints])
    return fitted_inputs(proof_inputs.fingerprints, fingerprints, noun=proof_inputs.kind)


def _whole(steps: Sequence[Step], answers: Outputs, rules: Sequence[LinkRules]) -> list[Link]:
    """From the dense model to the last step, where there are several."""
    if len(steps) < 2:
        return []
    before, last = Reference(label=DENSE, answers=answers), steps[-1]
    return [rule.link(last.candidate, "whole", "whole", before, last.by_batch) for rule in rules]


def _figures(by_label: Mapping[str, Outputs], rules: Sequence[LinkRules]) -> dict[str, NDArray[np.generic]]:
    """Of each output; named by it where there are several."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for rule in rules:
        name = rule.port.name
        candidates = {label: answers[name] for label, answers in by_label.items() if label != DENSE}
        own = figures(by_label[DENSE][name], candidates, role=rule.port.role, threshold=rule.threshold)
        arrays |= {f"{name}.{key}" if rule.several else key: array for key, array in own.items()}
    return arrays


def _labelled(
    by_label: Mapping[str, Outputs], labels: NDArray[np.int64] | None, ports: Sequence[OutputPort]
) -> dict[str, Any]:
    """What labels tell of the first logits. Raises BadInput where there are labels and no logits."""
    if labels is None:
        return {"accuracy": (), "comparisons": ()}
    own = next((port.name for port in ports if port.role == "logits"), None)
    if own is None:
        roles = ", ".join(f"{port.name} is {port.role}" for port in ports)
        raise BadInput(f"labels: this model tells no classes apart ({roles}); leave the labels away")
    rows = {label: answers[own] for label, answers in by_label.items()}
    return {
        "accuracy": tuple(accuracy(label, each, labels) for label, each in rows.items()),
        "comparisons": tuple(
            mcnemar(DENSE, rows[DENSE], label, each, labels) for label, each in rows.items() if label != DENSE
        ),
    }
