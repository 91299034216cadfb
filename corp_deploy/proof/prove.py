"""Proofs as commands, recipes and Python run them: candidates from paths, the chain, and custom metrics."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from calib.store import load_moments
from corp_deploy.invocation.proof import Runtime
from corp_deploy.store.checkpoint import Checkpoint
from ground.errors import BadInput

from .candidates import Candidate, candidate_from_path, with_runtimes
from .chain import prove_chain
from .custom_metrics import TIME_LIMIT_S, Meter, MetricRequest
from .limits import ParityLimits
from .outcome import Proof, save_proof
from .own_noise import DENSE
from .proof_inputs import ProofInputs


def _renamed(candidate: Candidate, parts: Sequence[str]) -> Candidate:
    """Return the candidate with these last parts of its path in its name and label."""
    path = candidate.path
    is_file = candidate.form != "torch"
    name = candidate.name.removeprefix(path.parent.name if is_file else path.name)
    label = candidate.label.removeprefix(f"{path.parent.name}/{path.name}" if is_file else path.name)
    *folders, last = parts
    words = [*folders, Path(last).stem if is_file else last]
    return replace(candidate, name=f"{'-'.join(words)}{name}", label=f"{'/'.join(parts)}{label}")


def _unreserved(candidate: Candidate) -> Candidate:
    """Return the candidate with a name and a label that differ from the reference's and the whole chain's."""
    if candidate.label == DENSE:
        candidate = replace(candidate, label=f"candidate {DENSE}")
    # "whole" is the name of the link from the dense model to the last candidate.
    return replace(candidate, name="candidate whole") if candidate.name == "whole" else candidate


def with_distinct_names(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates; those that share a name or a label are renamed by the shortest path ends that differ.

    Raises BadInput if a path is given twice.
    """
    twice = [path for path, count in Counter(os.path.abspath(each.path) for each in candidates).items() if count > 1]
    if twice:
        raise BadInput(f"{twice[0]}: given twice as a candidate; give each candidate once")
    paths = [Path(os.path.normpath(each.path)) for each in candidates]  # as typed: no link is resolved
    names, labels = Counter(each.name for each in candidates), Counter(each.label for each in candidates)
    chosen, depth = [_unreserved(each) for each in candidates], 0
    deepest = max(len(path.parts) for path in paths) if paths else 0
    while not len({each.name for each in chosen}) == len({each.label for each in chosen}) == len(chosen):
        depth += 1
        assert depth <= deepest, paths
        chosen = [
            _renamed(each, path.parts[-depth:]) if names[each.name] > 1 or labels[each.label] > 1 else _unreserved(each)
            for each, path in zip(candidates, paths, strict=True)
        ]
    return chosen


def candidates_from_paths(
    paths: Sequence[str | os.PathLike[str]], runtimes: Sequence[Runtime] = (), *, below: Path = Path()
) -> list[Candidate]:
    """Return candidates with distinct names, each graph also in these runtimes; relative paths are within `below`."""
    candidates = [candidate_from_path(os.fspath(path), below=below) for path in paths]
    return with_runtimes(with_distinct_names(candidates), runtimes)


def run_proof(
    dense: Checkpoint,
    candidates: Sequence[Candidate],
    inputs: ProofInputs,
    limits: ParityLimits,
    *,
    output: Path | None,
    moments_file: Path | None = None,
    metrics: Sequence[MetricRequest] = (),
    metric_inputs: ProofInputs | None = None,
    metric_time_limit_s: float = TIME_LIMIT_S,
    below: Path = Path(),
    warn: Callable[[str], None] = lambda sentence: None,
    on_progress: Callable[[int], None] = lambda finished: None,
) -> Proof:
    """Prove a chain from the dense model to the last candidate, and write the record to `output`.

    Args:
        dense: The model that the chain starts from.
        candidates: The steps of the chain, in order.
        inputs: The inputs of all steps.
        limits: The limits that the chain has to keep, and the batch sizes.
        output: The record to write, with the figures of every input beside it.
        moments_file: Moments of the calibration, by which the inputs are compared with the calibration's.
        metrics: Measures of the user's own, run in the directory `below` on the outputs of every step.
        metric_inputs: The same inputs with names and labels for the metrics, by default `inputs`.
        metric_time_limit_s: The longest that one run of a metric may take, in seconds.
        below: The directory that the commands of metrics are run in.
        warn: Called, before any step runs, with a sentence for each limit that so few inputs can't prove.
        on_progress: Called with the number of finished candidates.
    """
    for sentence in limits.unreachable(inputs.images):
        warn(sentence)
    meter = Meter(metrics, metric_inputs or inputs, below=below, time_limit_s=metric_time_limit_s)
    proof = prove_chain(
        dense,
        candidates,
        inputs,
        limits=limits,
        moments=None if moments_file is None else load_moments(moments_file),
        on_progress=on_progress,
        answered=meter.measure,
    )
    proof = meter.beside(proof)
    if output is not None:
        save_proof(proof, output)
    return proof
