"""Two engines of one graph on the same inputs: what one answered, in this environment or another, against the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput, Missing, NotComparable
from ground.feeds import Outputs, checked_feeds
from perf.parity import structure
from perf.parity.measures import figures
from perf.parity.parity import LinkKind, Parity, link

from .artefact import Artefact
from .candidates import outputs_at
from .chain import Proof
from .golden import Golden
from .inputs import ProofInputs
from .link_rules import ParityLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """What to type in an environment that loads the reference, and then in this one."""

    inputs: str
    output: str

    def elsewhere(self, reference: Path, candidates: Sequence[Path]) -> str:
        """The pair of commands for two environments."""
        second = " ".join(["corp-deploy verify golden", *map(str, candidates), "-o", self.output])
        return (
            f"each engine needs an environment that loads it; where {reference} does:\n"
            f"  corp-deploy verify {reference} {self.inputs} --write-golden golden\n"
            f"and where {' and '.join(map(str, candidates))} does, with the directory golden:\n  {second}"
        )


def golden_of(
    artefact: Artefact, inputs: ProofInputs, batches: Sequence[int], *, elsewhere: str | None = None
) -> Golden:
    """What it answers here, at the largest of these batch sizes. Raises Missing where it can't be run here."""
    batch = max(artefact.sizes(batches))
    feeds = checked_feeds(inputs.feeds, artefact.inputs, where=f"inputs for {artefact.path}")
    hint = "run this where that library and its GPU are: an engine is loaded by what built it"
    with artefact.opened(elsewhere or hint) as run:
        answers = outputs_at(run, feeds, batch)
    return Golden(
        source=artefact.source,
        images=inputs.images,
        batch=batch,
        outputs=artefact.outputs,
        feeds=feeds,
        answers=answers,
        names=inputs.names,
    )


def require_one_graph(golden_graph: str, reference: str, candidates: Sequence[Artefact]) -> None:
    """Raise NotComparable for candidates that were built of another graph."""
    for each in candidates:
        if each.source.graph_sha256 != golden_graph:
            raise NotComparable(
                f"{each.path}: built of the graph {each.source.graph_sha256[:16]}..., {reference} of "
                f"{golden_graph[:16]}...: what differs may be the models and not the engines; compare two engines of "
                "one .onnx file, or say --other-graph if two graphs are meant"
            )


def require_one_environment(artefacts: Sequence[Artefact], elsewhere: str) -> None:
    """Raise Missing where two versions of one library would have to be loaded into one process."""
    engines = [each for each in artefacts if each.candidate.form == "engine"]
    for each in engines[1:]:
        first = next(other for other in engines if other.source.backend == each.source.backend)
        if each.source.version != first.source.version and not (each.movable or first.movable):
            raise Missing(
                f"{first.path} was built by {first.source.backend} {first.source.version}, {each.path} by "
                f"{each.source.version}, and one process loads one version only; {elsewhere}"
            )


def compare(
    golden: Golden,
    candidates: Sequence[Artefact],
    *,
    batches: Sequence[int],
    limits: ParityLimits,
    elsewhere: str,
    on_progress: Callable[[int], None] | None = None,
    answered: Callable[[str, Outputs], None] | None = None,
) -> Proof:
    """Every candidate against the golden answers, a link an output; raises BadInput for other inputs or outputs.
    `on_progress` and `answered` hear as they do of `prove`.
    """
    links, findings = [], []
    arrays: dict[str, NDArray[np.generic]] = {}
    output_limits, several = limits.of_outputs(), len(golden.outputs) > 1
    if answered is not None:
        answered(golden.source.label, golden.answers)
    for place, each in enumerate(candidates):
        _require_outputs(golden, each)
        feeds = checked_feeds(golden.feeds, each.inputs, where=f"inputs for {each.path}")
        with each.opened(elsewhere) as run:
            by_batch = {size: outputs_at(run, feeds, size) for size in each.sizes(batches)}
        answers = by_batch[max(by_batch)]
        if answered is not None:
            answered(each.source.label, answers)
        findings += structure.outputs(each.source.label, answers, noun=golden.images.kind)
        own_name = each.candidate.name.lstrip("-")  # of a file right here
        name = own_name if len(candidates) == 1 else f"{place + 1} {own_name}"
        for port in golden.outputs:
            links.append(
                link(
                    name=name,
                    kind=_kind(golden, each),
                    reference=golden.source.label,
                    candidate=each.source.label,
                    reference_rows=golden.answers[port.name],
                    candidate_by_batch={size: rows[port.name] for size, rows in by_batch.items()},
                    tolerance=output_limits,
                    port=port,
                    several=several,
                )
            )
            own = figures(golden.answers[port.name], {name: answers[port.name]}, role=port.role)
            arrays |= {f"{port.name}.{key}" if several else key: np.asarray(array) for key, array in own.items()}
        if on_progress is not None:
            on_progress(place + 1)
    sources = (golden.source, *(each.source for each in candidates))
    parity = Parity(images=golden.images, links=tuple(links), structure=tuple(findings), sources=sources)
    return Proof(parity=parity, figures=arrays)


def _kind(golden: Golden, artefact: Artefact) -> LinkKind:
    """By what the candidate is held in."""
    if artefact.candidate.quantised:
        return "quantised"
    return "exact" if golden.source.precision == artefact.source.precision == "fp32" else "half"


def _require_outputs(golden: Golden, artefact: Artefact) -> None:
    own, expected = [port.name for port in artefact.outputs], [port.name for port in golden.outputs]
    if sorted(own) != sorted(expected):
        raise BadInput(f"{artefact.path}: gives {', '.join(own)}, expected {', '.join(expected)} as the reference does")
