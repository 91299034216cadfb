"""The function corp_deploy.verify."""

import os
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from calib.batches import Batches
from corp_deploy.invocation.input_choice import Drawn, HoldOutOptions
from corp_deploy.invocation.option import Labels
from corp_deploy.invocation.proof import ProofFiles, ProofOptions
from corp_deploy.proof.candidates import require_batches
from corp_deploy.proof.engine_trust import trusting_engines
from corp_deploy.proof.limits import ParityLimits
from corp_deploy.proof.model_inputs import inputs_from_set
from corp_deploy.proof.prove import candidates_from_paths, run_proof
from corp_deploy.store.labels import labels_for, labels_in_batches
from ground.errors import BadInput
from perf.parity.parity import Parity

from .in_python import function_from_record, message_in_python
from .models import ModelLike, PathLike, module_beside, open_inputs, open_model
from .values import InputsLike, entry_of_labels, given_inputs


def _paths_of_candidates(paths: PathLike | Sequence[PathLike]) -> list[PathLike]:
    if isinstance(paths, str | os.PathLike) or not isinstance(paths, Sequence):
        paths = [paths]
    if odd := [type(each).__name__ for each in paths if not isinstance(each, str | os.PathLike)]:
        raise BadInput(f"candidates: a {odd[0]}; give what reduce returned, or a directory, a graph or an engine")
    if not paths:
        raise BadInput("candidates: got none, expected a directory, a graph or an engine to compare with the reference")
    return list(paths)


@dataclass(frozen=True, kw_only=True)
class VerifyCall(HoldOutOptions, Drawn, ProofOptions, ProofFiles):
    """The parameters of `verify`."""

    reference: ModelLike = field(kw_only=False)
    candidates: PathLike | Sequence[PathLike] = field(kw_only=False)
    inputs: InputsLike = field(kw_only=False)
    labels: Labels | None = None
    trust_engine: bool = False


@function_from_record(VerifyCall)
def verify(call: VerifyCall) -> Parity:
    """Prove on real inputs, link by link, how far candidates are from a reference model.

    `candidates` are in the order in which they were made: reduced directory, FP32 graph, FP16 graph, engine. Each
    is compared with the one before. The reduced model is judged, at every output, by `min_agreement` (the share of
    inputs that agree) and `max_error` (‖candidate − reference‖ / ‖reference‖), or by `output_limit` at single ones,
    unless `exclude_output` names it. `labels` are class indices [N] of all inputs, also of those that `hold_out`
    doesn't leave to judge: an array, a list, a file, a mapping from file names, the word folders, or the name of an
    entry of batches that are dicts; of batches that are tuples the second entry is taken. `moments` show
    whether these inputs look like those of calibration. The record is written to `output`, parity.json, with the
    figures of every input beside it.

    `min_agreement` and `min_pixels` are judged by intervals of this `confidence`. Warns, before any work, if the inputs
    are too few to show such a share.

    Returns the proof: `verdict` is PASS, FAIL, INCONCLUSIVE (a limit lies within its interval) or UNJUDGED (no limit
    judged one of the outputs, which `unjudged` names), `links` hold every figure, `located` names the block where a
    link breaks, `fitted` has the number of inputs that a candidate was fitted to. Raises BadInput for candidates that
    aren't of this model and for engines that were not built here unless `trust_engine`; Missing where this machine
    can't run one.
    """
    limits = ParityLimits.from_options(call.values)
    entry = entry_of_labels(call.labels, call.inputs)
    given = given_inputs(call.inputs, labels=entry)
    with ExitStack() as stack:
        stack.enter_context(trusting_engines(call.trust_engine))
        dense = stack.enter_context(open_model(call.reference, given))
        stack.enter_context(module_beside(call.candidates))
        steps = candidates_from_paths(_paths_of_candidates(call.candidates), call.runtimes)
        for sentence in require_batches(steps, call.batches) if "batches" in call.non_default else ():
            warnings.warn(message_in_python(sentence, VerifyCall), stacklevel=3)
        input_set = open_inputs(dense.model, given, **call.drawn)
        proving = call.proving(input_set, call.seed)
        labels = None if call.labels is None or entry else labels_for(call.labels, proving.identified(), dense.model)
        proof_inputs = inputs_from_set(proving, labels)
        if labels is None and isinstance(given, Batches):
            proof_inputs = replace(proof_inputs, labels=labels_in_batches(given, proving, dense.model))
        proof = run_proof(
            dense,
            steps,
            proof_inputs,
            limits,
            output=None if call.output is None else Path(call.output),
            moments_file=None if call.moments is None else Path(call.moments),
            warn=lambda sentence: warnings.warn(message_in_python(sentence, VerifyCall), stacklevel=5),
        )
    return proof.parity
