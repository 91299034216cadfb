"""Proofs as commands, recipes and Python run them: candidates from paths, the chain, metrics of the user's own."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from calib.store import load_moments
from corp_deploy.invocation.proof import Runtime
from corp_deploy.store.checkpoint import Checkpoint

from .candidate_names import with_distinct_names
from .candidates import Candidate, candidate_from_path, with_runtimes
from .chain import prove_chain
from .custom_metrics import TIME_LIMIT_S, Meter, MetricRequest
from .limits import ParityLimits
from .outcome import Proof, save_proof
from .proof_inputs import ProofInputs


def candidates_from_paths(
    paths: Sequence[str | os.PathLike[str]], runtimes: Sequence[Runtime] = (), *, below: Path = Path()
) -> list[Candidate]:
    """Return candidates with names of their own, each graph also in these runtimes; relative paths start `below`."""
    candidates = [candidate_from_path(os.fspath(path), below=below) for path in paths]
    return with_runtimes(with_distinct_names(candidates), runtimes)


def prove(
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
        moments_file: Moments of the calibration, which show whether the inputs look like its inputs.
        metrics: Measures of the user's own, run in the directory `below` on the outputs of every step.
        metric_inputs: The inputs with the names and labels that only metrics are given.
        metric_time_limit_s: The longest that one run of a metric may take, in seconds.
        below: The directory that the commands of metrics are run in.
        warn: Called, before any step runs, with a sentence for each limit that so few inputs can't show to be kept.
        on_progress: Called with the number of finished candidates.
    """
    for sentence in limits.unreachable(inputs.images):
        warn(sentence)
    meter = Meter(metrics, metric_inputs or inputs, below=below, time_limit_s=metric_time_limit_s)
    proof = prove_chain(
        dense,
        candidates,
        inputs,
        batches=limits.batches,
        limits=limits,
        moments=None if moments_file is None else load_moments(moments_file),
        on_progress=on_progress,
        answered=meter.measure,
    )
    proof = meter.beside(proof)
    if output is not None:
        save_proof(proof, output)
    return proof
