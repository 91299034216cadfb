"""corp-deploy verify."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from corp_deploy.invocation.inputs import KINDS
from corp_deploy.invocation.table import VERIFY_REFERENCE
from corp_deploy.views.console import Output

from .command import command, some
from .decoder import verify_graph
from .model_choice import ModelChoice
from .options import ANY_PATH, explicit_options, trust_engine_option
from .verify_run import ProofInputChoice, VerifyRun, keep_proof

if TYPE_CHECKING:
    from corp_deploy.proof.candidates import Candidate


def _refuse_other_batches(candidates: "Sequence[Candidate]", batches: Sequence[int]) -> None:
    """Raise UsageError where the batch sizes that were asked for leave out the only one that a candidate takes."""
    for candidate in candidates:
        if candidate.batch not in (None, *batches):
            raise click.UsageError(
                f"{candidate.label}: its batch is fixed at {candidate.batch}, and --batch "
                f"{','.join(map(str, batches))} leaves that out; add {candidate.batch}, or leave --batch out"
            )


@command(first="weights images random labels samples output batch min-agreement max-error hold-out")
@click.argument("model", metavar="REFERENCE")
@click.argument("candidates", nargs=-1, type=ANY_PATH)
@trust_engine_option
def verify(
    model: ModelChoice,
    candidates: tuple[Path, ...],
    inputs: Annotated[ProofInputChoice, some(*KINDS, "random", "labels", "samples", "seed", "hold_out", "groups")],
    options: VerifyRun,
    out: Output,
) -> int:
    """Prove on real inputs how far CANDIDATES are from REFERENCE. Name REFERENCE as you name --model of other commands.

    Link by link; exit code 1 when one fails. A link without a limit is measured, not passed: set --min-agreement or
    --max-error. Exit 3 when no link had one.

    An agreement is a share of inputs and has an interval: the link passes if no part of it lies below the limit, and
    fails if all of it does; in between it is INCONCLUSIVE (exit 3), and the message says how many inputs would decide.
    gate judges in the same way, with its own --confidence. If there are too few inputs to show the limit at all, a
    warning comes first.

    A separate dense head (--head) is run on the named outputs of every step; its maps are links of their own: relative
    error, intersection over union, pixels that agree.

    A directory of export-decoder is compared with transformers in FP32 on the directory that it was built from
    (--random 2): all tokens at once, then token by token with the key/value cache. Without --max-error the limit of an
    FP32 graph is 1e-4, and others are only measured.

    Give the candidates in the order they were made: reduced directory, FP32 graph, FP16 graph.

    REFERENCE is whatever --model of other commands takes: a directory, hf:DIR, a timm name with --weights, or a .toml
    with [model] (a recipe, or the file that calibrate writes beside moments).

    With a .plan (or .onnx) as REFERENCE, engines of the same graph are compared with it; exit 5 if they were built from
    other graphs. If two versions need separate environments, --write-golden saves the outputs of the first, and its
    directory is the REFERENCE in the second.

    Example: corp-deploy verify dense reduced reduced/model.onnx reduced/model.fp16.onnx --images photos/ -o parity.json
    """
    from calib.store import load as load_moments
    from corp_deploy.families.decoder_builder import SETTINGS
    from corp_deploy.proof.candidates import candidate_from_path, of_model, with_runtimes
    from corp_deploy.proof.chain import prove
    from corp_deploy.proof.custom_metrics import Meter, require_runnable
    from corp_deploy.proof.link_rules import ParityLimits
    from corp_deploy.proof.second_opinion import require_second_opinion, write_second_opinion
    from corp_deploy.store.hub_snapshot import PREFIX

    limits = ParityLimits.from_options(options.values)
    of_engines = Path(model.model).suffix in (".plan", ".onnx") or (Path(model.model) / "golden.json").exists()
    of_graph = len(candidates) == 1 and (candidates[0] / SETTINGS).is_file()
    way = "engine" if of_engines else "decoder" if of_graph else "model"
    VERIFY_REFERENCE.refuse([(model.model, way)], explicit_options())
    if of_engines:
        return options.compare(Path(model.model), candidates, inputs, limits, out)
    if of_graph:
        directory, output = Path(model.model.removeprefix(PREFIX)), options.record_of(candidates)
        return verify_graph(directory, candidates[0], output, options, inputs, out)
    inputs.require()
    output = options.record_of(candidates)
    require_runnable(options.metrics)
    dense = model.load(out)
    steps = of_model(with_runtimes([candidate_from_path(path) for path in candidates], options.runtimes), dense)
    if options.polygraphy is not None:
        require_second_opinion(steps)
    if "batch" in explicit_options():
        _refuse_other_batches(steps, options.batches)
    proof_inputs = inputs.of_model(dense, pixels=any(step.takes_pixels for step in steps))
    for sentence in limits.unreachable(proof_inputs.images):
        out.warn(sentence)
    meter = Meter(options.metrics, proof_inputs, time_limit_s=options.metric_time_limit)
    with out.progress("verifying", len(steps), unit="links") as bar:
        proof = prove(
            dense,
            steps,
            proof_inputs,
            batches=options.batches,
            limits=limits,
            moments=None if options.moments is None else load_moments(Path(options.moments)),
            on_progress=bar,
            answered=meter.measure,
        )
    proof = meter.beside(proof)
    again: list[str] = []
    if (there := options.polygraphy) is not None:
        written = write_second_opinion(proof, steps, proof_inputs.feeds, there, batch=max(options.batches))
        again = [f"in {there}:", *written]
    return keep_proof(proof, output, out, *again)
