"""Engines of one graph compared on the same inputs, in one environment or by golden outputs from another.

Golden outputs are those of a reference engine or graph. Their directory has inputs.npz, outputs.npz, and golden.json
with the digests of both, the engine and its batch size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ground.arrays import arrays_from_npz
from ground.errors import BadInput, Missing, NotComparable
from ground.feeds import Feeds, Outputs, batch_size, checked_feeds
from ground.files import replacing, sha256_of_file, write_json
from ground.ports import OutputPort
from ground.records import Positive, Sha256, json_from_record, record_from_file
from perf.parity import structure
from perf.parity.labels import ComparedArtefact
from perf.parity.link import LinkKind, measure_link
from perf.parity.measures import figures_by_input
from perf.parity.parity import ImageSet, Parity

from .artefact import Artefact
from .candidates import run_in_batches
from .limits import ParityLimits
from .outcome import Proof
from .proof_inputs import ProofInputs

KIND, VERSION = "golden", 1
RECORD, INPUTS, OUTPUTS = "golden.json", "inputs.npz", "outputs.npz"


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenFacts:
    """The engine or graph of golden outputs, its inputs with their names (if any), and the batch size of the run."""

    source: ComparedArtefact
    images: ImageSet
    batch: Positive
    outputs: tuple[OutputPort, ...]
    names: tuple[str, ...] = ()

    @property
    def shared(self) -> dict[str, Any]:
        """The values, by field, that GoldenRecord, on disk, and Golden, in memory, have in common."""
        return {each.name: getattr(self, each.name) for each in fields(GoldenFacts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRecord(GoldenFacts):
    """The content of golden.json."""

    inputs_sha256: Sha256
    outputs_sha256: Sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden(GoldenFacts):
    """Inputs [N, ...] by name, and one artefact's outputs for them."""

    feeds: Feeds
    answers: Outputs

    def __post_init__(self) -> None:
        names = [port.name for port in self.outputs]
        if sorted(names) != sorted(self.answers) or batch_size(self.feeds) != batch_size(self.answers):
            raise BadInput(
                f"golden outputs {', '.join(self.answers)} of {batch_size(self.answers)} inputs, expected "
                f"{', '.join(names)} of {batch_size(self.feeds)}; write them again"
            )


def write_golden(golden: Golden, directory: Path) -> None:
    """Write golden outputs to a directory: the arrays, then the record, so that one with a record is complete."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, arrays in ((INPUTS, golden.feeds), (OUTPUTS, golden.answers)):
        with replacing(directory / name) as temporary, temporary.open("wb") as file:
            np.savez(file, **{key: np.asarray(array) for key, array in arrays.items()})  # type: ignore[arg-type]
    inputs, outputs = (sha256_of_file(directory / name) for name in (INPUTS, OUTPUTS))
    record = GoldenRecord(**golden.shared, inputs_sha256=inputs, outputs_sha256=outputs)
    write_json(directory / RECORD, {"kind": KIND, "version": VERSION, **json_from_record(record)})


def read_golden(directory: Path) -> Golden:
    """Read a golden directory; raise BadInput if arrays differ from the digests in its record."""
    again = "write it again with `corp-deploy verify A.plan --write-golden DIR`"
    record = record_from_file(directory / RECORD, GoldenRecord, kind=KIND, version=VERSION, remedy=again)
    feeds = _arrays(directory / INPUTS, record.inputs_sha256)
    return Golden(**record.shared, feeds=feeds, answers=_arrays(directory / OUTPUTS, record.outputs_sha256))


def _arrays(path: Path, digest: str) -> Mapping[str, NDArray[Any]]:
    if not path.is_file() or sha256_of_file(path) != digest:
        what = "its bytes are not those" if path.is_file() else "missing, a file"
        raise BadInput(f"{path}: {what} that {RECORD} describes; copy or write the directory again")
    return arrays_from_npz(path)


def commands_for_two_environments(reference: Path, candidates: Sequence[Path], *, inputs: str, output: Path) -> str:
    """Return the commands for the environment that loads the reference, and for the one that loads the candidates."""
    second = " ".join(["corp-deploy verify golden", *map(str, candidates), "-o", str(output)])
    return (
        f"each engine needs an environment that loads it; where {reference} does:\n"
        f"  corp-deploy verify {reference} {inputs} --write-golden golden\n"
        f"and where {' and '.join(map(str, candidates))} does, with the directory golden:\n  {second}"
    )


def make_golden(
    artefact: Artefact, inputs: ProofInputs, batches: Sequence[int], *, elsewhere: str | None = None
) -> Golden:
    """Return an artefact's outputs at the largest of these batch sizes that it runs; raise Missing if it can't load."""
    batch = max(artefact.sizes(batches))
    feeds = checked_feeds(inputs.feeds, artefact.inputs, where=f"inputs for {artefact.path}")
    hint = "run this on a machine with that library and GPU: an engine loads only in the library that built it"
    with artefact.opened(elsewhere or hint) as run:
        answers = run_in_batches(run, feeds, batch)
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
    """Raise NotComparable for candidates that were built from another graph."""
    for each in candidates:
        if each.source.graph_sha256 != golden_graph:
            raise NotComparable(
                f"{each.path}: built from the graph {each.source.graph_sha256[:16]}..., {reference} from "
                f"{golden_graph[:16]}..., so the models may differ, not only the engines; compare two engines of one "
                ".onnx file, or give --other-graph if two graphs are meant"
            )


def require_one_environment(artefacts: Sequence[Artefact], elsewhere: str) -> None:
    """Raise Missing, with the advice `elsewhere`, if one process would have to load two versions of a library."""
    engines = [each for each in artefacts if each.candidate.form == "engine"]
    for each in engines[1:]:
        first = next(other for other in engines if other.source.backend == each.source.backend)
        if each.source.version != first.source.version and not (each.movable or first.movable):
            raise Missing(
                f"{first.path} was built by {first.source.backend} {first.source.version}, {each.path} by "
                f"{each.source.version}, and one process loads one version only; {elsewhere}"
            )


def compare_engines(
    golden: Golden,
    candidates: Sequence[Artefact],
    *,
    limits: ParityLimits,
    elsewhere: str,
    on_progress: Callable[[int], None] = lambda finished: None,
    answered: Callable[[str, Outputs], None] = lambda label, outputs: None,
) -> Proof:
    """Compare every candidate with the golden outputs, by one link for each output, as `prove_chain` does."""
    links, findings = [], []
    arrays: dict[str, NDArray[np.generic]] = {}
    several = len(golden.outputs) > 1
    answered(golden.source.label, golden.answers)
    for place, each in enumerate(candidates):
        own, expected = ([port.name for port in outputs] for outputs in (each.outputs, golden.outputs))
        if sorted(own) != sorted(expected):
            raise BadInput(f"{each.path}: gives {', '.join(own)}, expected {', '.join(expected)} as the reference does")
        exact = golden.source.precision == each.source.precision == "fp32"
        kind: LinkKind = "quantised" if each.candidate.quantised else "exact" if exact else "half"
        feeds = checked_feeds(golden.feeds, each.inputs, where=f"inputs for {each.path}")
        with each.opened(elsewhere) as run:
            by_batch = {size: run_in_batches(run, feeds, size) for size in each.sizes(limits.batches)}
        answers = by_batch[max(by_batch)]
        answered(each.source.label, answers)
        findings += structure.check_output_values(each.source.label, answers, noun=golden.images.kind)
        own_name = each.candidate.name.lstrip("-")  # a file in this directory has no folder before the dash
        name = own_name if len(candidates) == 1 else f"{place + 1} {own_name}"
        for port in golden.outputs:
            expected_rows = golden.answers[port.name]
            threshold = limits.threshold_of(port, expected_rows)
            links.append(
                measure_link(
                    name=name,
                    kind=kind,
                    reference=golden.source.label,
                    candidate=each.source.label,
                    reference_rows=expected_rows,
                    candidate_by_batch={size: rows[port.name] for size, rows in by_batch.items()},
                    tolerance=limits.of_port(port),
                    port=port,
                    several=several,
                    threshold=threshold,
                )
            )
            found = figures_by_input(expected_rows, {name: answers[port.name]}, role=port.role, threshold=threshold)
            arrays |= {f"{port.name}.{key}" if several else key: np.asarray(array) for key, array in found.items()}
        on_progress(place + 1)
    sources = (golden.source, *(each.source for each in candidates))
    parity = Parity(images=golden.images, links=tuple(links), structure=tuple(findings), sources=sources)
    return Proof(parity=parity, figures=arrays)
