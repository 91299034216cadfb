"""The parity chain on real inputs, link by link: dense torch, reduced torch, ONNX FP32, FP16 or BF16, engine."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calib.moments import Moments
from corp_deploy.families.family import input_ports, output_ports
from corp_deploy.reduction.moments import require_same_model
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.class_names import class_names_of_lineage
from corp_deploy.store.fitted import fitted_inputs
from ground.errors import BadInput
from ground.feeds import Feeds, Outputs, checked_feeds, select_rows
from ground.precision import FLOAT16, FloatType
from perf.parity.block_outputs import check_headroom
from perf.parity.labels import accuracy_by_class, accuracy_on_labels, mcnemar
from perf.parity.link import Link, LinkKind
from perf.parity.locate import FaultLocation
from perf.parity.measures import figures_by_input, require_agreement
from perf.parity.parity import Parity
from perf.parity.structure import StructuralTest
from perf.runners.module import ModuleRunner

from .candidates import Candidate, Run, run_in_batches, with_preprocessing
from .heads import ProofHeads, open_heads
from .limits import ParityLimits
from .link_rules import LinkReference, LinkRules, build_link_rules, with_origin, with_reasons
from .locate import locate_fault_of_link, select_worst_inputs
from .outcome import Proof
from .own_noise import DENSE, MergeNoise, measure_merge_noise
from .proof_inputs import ProofInputs, require_pixels
from .structural_tests import check_input_range, measure_shift, run_structural_tests

HEADROOM_INPUTS = 8  # inputs on which values are compared with float16's largest
EACH_SIZE = 4  # inputs at each batch size but the largest


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStep:
    """A candidate that has been run.

    It has the outputs by batch size, a link for each output, the findings of structural tests, and the fault of its
    first failing link, if located. `merges` is the merge noise of the torch model that it is or was made from.
    """

    candidate: Candidate
    by_batch: Mapping[int, Outputs]
    links: tuple[Link, ...]
    findings: tuple[StructuralTest, ...]
    merges: MergeNoise | None
    located: FaultLocation | None = None

    @property
    def answers(self) -> Outputs:
        return self.by_batch[max(self.by_batch)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """One proof: the dense model with its outputs, the inputs and batch sizes, the rules of each output, and the heads.

    `halves` are the types of fewer bits than float32 that occur among the candidates.
    """

    dense: Checkpoint
    answers: Outputs
    feeds: Feeds
    batches: Sequence[int]
    rules: Sequence[LinkRules]
    heads: ProofHeads
    halves: Collection[FloatType]

    def walk(
        self, candidates: Sequence[Candidate], on_progress: Callable[[Sequence[ChainStep]], None]
    ) -> list[ChainStep]:
        """Return a step for every candidate: its comparison with its reference, and the located fault.

        The reference of a torch model is the dense model, that of a graph or engine the last FP32 step before it, or
        the dense model if there is none.
        """
        steps = list[ChainStep]()
        single: ChainStep | None = None
        model = self.dense.model
        merges = self._merges_of(self.dense, self.answers, max(self.batches))
        for candidate in candidates:
            if candidate.form == "torch" or single is None:
                own = None if candidate.form == "torch" else merges
                before = LinkReference(label=DENSE, answers=self.answers, merges=own)
            else:
                before = LinkReference(label=single.candidate.label, answers=single.answers, merges=merges)
            previous = None if single is None else single.candidate
            model = model if candidate.checkpoint is None else candidate.checkpoint.model
            step = self._step(candidate, before)
            step = replace(step, located=self._located(step, before, previous))
            step = replace(step, links=with_origin(step.links, candidate, model))
            is_fp16 = candidate.float_type is FLOAT16 and candidate.runtime is None and candidate.form == "graph"
            if is_fp16 and previous is not None and previous.form == "graph":
                few = previous.fed(select_rows(self.feeds, slice(HEADROOM_INPUTS)))
                room = check_headroom(candidate.label, previous.path, candidate.path, few)
                step = replace(step, findings=(*step.findings, room))
            merges = merges if candidate.checkpoint is None else step.merges
            single = single if candidate.rounds or candidate.runtime is not None else step
            steps.append(step)
            on_progress(steps)
        return steps

    @property
    def judging(self) -> list[LinkRules]:
        """The rules of outputs that aren't excluded."""
        return [rule for rule in self.rules if not rule.of_user().excluded]

    def whole(self, steps: Sequence[ChainStep]) -> list[Link]:
        """Return the links from the dense model to the last step, one for each output.

        If there is a single step, its own links say the same, and it has these links only if it is a graph or an engine
        and the user set limits.
        """
        is_reduced = steps[0].candidate.form == "torch"
        if len(steps) < 2 and (is_reduced or not any(rule.of_user().bounds for rule in self.rules)):
            return []
        before, last = LinkReference(label=DENSE, answers=self.answers), steps[-1]
        return [rule.link(last.candidate, "whole", "whole", before, last.by_batch) for rule in self.rules]

    def _step(self, candidate: Candidate, before: LinkReference) -> ChainStep:
        bounds = [rule.rounding(candidate.float_type).max_relative_error for rule in self.judging]
        bound = max(each for each in bounds if each is not None)
        with self._opened(candidate) as run:
            by_batch = self._by_batch(candidate, run)
            merges = before.merges
            if candidate.checkpoint is not None:
                merges = self._merges_of(candidate.checkpoint, by_batch[max(by_batch)], max(by_batch))
            findings = run_structural_tests(candidate, run, self.feeds, by_batch, bound, merges)
        narrow: LinkKind = "quantised" if candidate.quantised else "half"
        kind: LinkKind = "reduced" if candidate.form == "torch" else narrow if candidate.rounds else "exact"

        def links_of(by_batch: Mapping[int, Outputs]) -> tuple[Link, ...]:
            return tuple(rule.link(candidate, candidate.name, kind, before, by_batch) for rule in self.rules)

        def links_as_typed() -> tuple[Link, ...]:
            with self._opened(replace(candidate, as_typed=True)) as run:
                return links_of(self._by_batch(candidate, run))

        links = with_reasons(links_of(by_batch), candidate, links_as_typed)
        return ChainStep(candidate=candidate, by_batch=by_batch, links=links, findings=tuple(findings), merges=merges)

    @contextmanager
    def _opened(self, candidate: Candidate) -> Iterator[Run]:
        """Yield a function that runs a candidate and the heads, which compute score maps from its outputs."""
        with candidate.opened([rule.port for rule in self.rules if rule.port not in self.heads.ports]) as backbone:
            yield self.heads.behind(backbone, max(self.batches))

    def _by_batch(self, candidate: Candidate, run: Run) -> dict[int, Outputs]:
        """Return outputs by batch size: all inputs at the largest or the fixed one, a few inputs at each other size."""
        if candidate.batch:
            return {candidate.batch: run_in_batches(run, self.feeds, candidate.batch)}
        *smaller, largest = sorted(set(self.batches))
        few = {size: select_rows(self.feeds, slice(max(size, EACH_SIZE))) for size in smaller}
        by_batch = {size: run_in_batches(run, some, size) for size, some in few.items()}
        return by_batch | {largest: run_in_batches(run, self.feeds, largest)}

    def _merges_of(self, checkpoint: Checkpoint, answers: Outputs, batch: int) -> MergeNoise | None:
        return measure_merge_noise(checkpoint, self.feeds, answers, batch, halves=self.halves, heads=self.heads)

    def _located(self, step: ChainStep, before: LinkReference, previous: Candidate | None) -> FaultLocation | None:
        failing = next((each for each in step.links if each.status == "FAIL"), None)
        if failing is None:
            return None
        own = failing.output or next(iter(step.answers))
        worst = select_worst_inputs(self.feeds, before.answers[own], step.answers[own], failing.role)
        return locate_fault_of_link(failing.name, step.candidate, previous, self.dense, worst, self.rules[0].products)


def prove_chain(
    dense: Checkpoint,
    candidates: Sequence[Candidate],
    proof_inputs: ProofInputs,
    *,
    limits: ParityLimits,
    moments: Moments | None = None,
    on_progress: Callable[[int], None] = lambda finished: None,
    answered: Callable[[str, Outputs], None] = lambda label, outputs: None,
) -> Proof:
    """Compare every candidate with a step before it, and the last one with the dense model.

    A torch candidate is compared with the dense model, within the user's limits; an FP32 graph with the torch model
    before it, within a float32 bound; a graph or engine of fewer bits with the last FP32 step, within a multiple of the
    dense model's own error in that type. If a graph fails, the block that errs is located. `moments` add the test for
    shifted inputs; the heads of `limits` add links of their maps. `on_progress` receives the number of finished
    candidates, `answered` the label and outputs of the dense model and of each candidate as soon as it has run. Raises
    BadInput if inputs, labels, heads or limits don't fit the model, or the moments are of another one.
    """
    if moments is not None:
        require_same_model(dense.model, moments)
    inputs, ports = input_ports(dense.model), output_ports(dense.model)
    for port in ports:
        if limits.of_port(port).min_agreement is not None:
            require_agreement(port, proof_inputs.count)
    feeds = checked_feeds(proof_inputs.feeds, inputs, where=f"inputs for {DENSE}")
    candidates = with_preprocessing(candidates, dense)
    for candidate in candidates:
        require_pixels(feeds, candidate.inputs, candidate.images, where=candidate.label)
    halves, batches = tuple(dict.fromkeys(each.float_type for each in candidates if each.rounds)), limits.batches

    def finished(steps: Sequence[ChainStep]) -> None:
        answered(steps[-1].candidate.label, steps[-1].answers)
        on_progress(len(steps))

    with open_heads(limits.heads, ports, threshold=limits.map_threshold) as heads:
        limits.require_applied([*ports, *heads.ports])
        with ModuleRunner(dense.model, inputs=inputs, outputs=ports, label=DENSE) as runner:
            answers = run_in_batches(heads.behind(runner, max(batches)), feeds, max(batches))
        answered(DENSE, answers)
        rules = build_link_rules(dense, feeds, answers, max(batches), limits, heads, halves)
        chain = Chain(
            dense=dense, answers=answers, feeds=feeds, batches=batches, rules=rules, heads=heads, halves=halves
        )
        steps = chain.walk(candidates, finished)
        records = heads.records
    by_label = {DENSE: answers} | {step.candidate.label: step.answers for step in steps}
    fingerprints = [candidate.fitted for candidate in candidates] + ([] if moments is None else [moments.fingerprints])
    return Proof(
        parity=Parity(
            images=proof_inputs.images,
            links=(*(each for step in steps for each in step.links), *chain.whole(steps)),
            structure=(
                *(each for step in steps for each in step.findings),
                *(check_input_range(moments, feeds) if moments is not None else ()),
            ),
            located=tuple(step.located for step in steps if step.located is not None),
            shift=None if moments is None else measure_shift(dense, moments, feeds),
            heads=records,
            fitted=fitted_inputs(proof_inputs.fingerprints, fingerprints, noun=proof_inputs.kind),
            **_labelled(by_label, proof_inputs, dense.lineage, rules),
        ),
        figures=_figures(by_label, rules),
        answers=by_label,
    )


def _figures(by_label: Mapping[str, Outputs], rules: Sequence[LinkRules]) -> dict[str, NDArray[np.generic]]:
    arrays: dict[str, NDArray[np.generic]] = {}
    for rule in rules:
        name = rule.port.name
        candidates = {label: answers[name] for label, answers in by_label.items() if label != DENSE}
        own = figures_by_input(by_label[DENSE][name], candidates, role=rule.port.role, threshold=rule.threshold)
        arrays |= {f"{name}.{key}" if rule.several else key: array for key, array in own.items()}
    return arrays


def _labelled(
    by_label: Mapping[str, Outputs], inputs: ProofInputs, lineage: Mapping[str, Any], rules: Sequence[LinkRules]
) -> dict[str, Any]:
    """Return Parity's `accuracy`, `comparisons` and `classes`, {} without labels; raise BadInput without logits."""
    labels = inputs.labels
    if labels is None:
        return {}
    own = next((rule for rule in rules if rule.port.role == "logits"), None)
    if own is None:
        roles = ", ".join(f"{rule.port.name} is {rule.port.role}" for rule in rules)
        raise BadInput(f"labels: this model has no logits ({roles}); leave the labels out")
    rows = {label: answers[own.port.name] for label, answers in by_label.items()}
    names = dict(enumerate(class_names_of_lineage(lineage))) or inputs.class_folders
    return {
        "accuracy": tuple(
            accuracy_on_labels(label, each, labels, threshold=own.threshold) for label, each in rows.items()
        ),
        "comparisons": tuple(
            mcnemar(DENSE, rows[DENSE], label, each, labels, threshold=own.threshold)
            for label, each in rows.items()
            if label != DENSE
        ),
        "classes": accuracy_by_class(rows[DENSE], [*rows.values()][-1], labels, names, threshold=own.threshold),
    }
