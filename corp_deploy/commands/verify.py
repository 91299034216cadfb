"""corp-deploy verify."""

from pathlib import Path

import click

from corp_deploy.invocation.table import VERIFY
from corp_deploy.views.console import Output
from ground.quantities import ERROR, FACTOR, SHARE
from ground.quantity import BATCH

from .numbers import Number
from .options import (
    ANY_PATH,
    BATCHES,
    FILE,
    IMAGES_HELP,
    ModelChoice,
    dense_options,
    given_options,
    output_options,
    samples_option,
    seed_option,
)


@click.command()
@click.argument("model", metavar="REFERENCE")
@click.argument("candidates", nargs=-1, required=True, type=ANY_PATH)
@dense_options
@click.option("--images", type=ANY_PATH, default=None, help=IMAGES_HELP)
@click.option("--random", type=Number(BATCH), default=None, help="Random inputs instead; the record says so.")
@click.option("--moments", type=FILE, default=None, help="Say whether these images look like those of calibration.")
@click.option(
    "--labels",
    type=FILE,
    default=None,
    help="Class indices of the images in their order (.npy, or key labels of .npz).",
)
@click.option(
    "--output", "-o", type=FILE, required=True, help="parity.json to write; per-image figures go to .npz beside it."
)
@click.option(
    "--batch", type=BATCHES, default="1,7,32", show_default=True, help="Batch sizes to run every candidate at."
)
@click.option("--min-agreement", type=Number(SHARE), default=None, help="Least top-1 agreement with the dense model.")
@click.option(
    "--max-error", type=Number(ERROR), default=None, help="Largest relative logit error of the reduced model."
)
@click.option(
    "--half-factor",
    type=Number(FACTOR),
    default=4.0,
    show_default=True,
    help="FP16 links may err by this multiple of the dense model's own FP16 error.",
)
@samples_option
@seed_option
@output_options
@click.pass_context
def verify(
    ctx: click.Context,
    model: ModelChoice,
    candidates: tuple[Path, ...],
    images: Path | None,
    random: int | None,
    moments: Path | None,
    labels: Path | None,
    output: Path,
    batch: tuple[int, ...],
    min_agreement: float | None,
    max_error: float | None,
    half_factor: float,
    samples: int | None,
    seed: int,
    out: Output,
) -> None:
    """Prove on real images, link by link, how far CANDIDATES are from REFERENCE; exit 1 when a link fails.

    A link without a limit is measured, not passed: set --min-agreement or --max-error. Exit 3 when no link had one.

    Give the candidates in the order they were made: reduced directory, FP32 graph, FP16 graph.

    Example: corp-deploy verify dense reduced reduced/model.onnx reduced/model.fp16.onnx --images photos/ -o parity.json
    """
    from calib.store import load as load_moments
    from corp_deploy.proof.candidates import candidate_from_path
    from corp_deploy.proof.chain import ParityLimits, given_from_images, prove, random_inputs
    from corp_deploy.proof.record import EXIT_CODES, save_proof
    from corp_deploy.store.inputs import images_for_model, labels_from_path
    from corp_deploy.views.parity import located_lines, parity_table

    if output.suffix == ".npz":
        raise click.BadParameter(f"{output}: the per-image figures go there; expected .json", param_hint="--output")
    if (images is None) == (random is None):
        raise click.UsageError("give --images, or --random when random inputs are really meant")
    VERIFY.refuse([("", "random" if images is None else "images")], given_options())
    dense = model.load(out)
    steps = [candidate_from_path(path) for path in candidates]
    for step in steps if "batch" in given_options() else ():
        if step.batch not in (None, *batch):
            raise click.UsageError(
                f"{step.label}: its batch is fixed at {step.batch}, and --batch {','.join(map(str, batch))} "
                f"leaves that out; add {step.batch}, or leave --batch away"
            )
    if images is None:
        given = random_inputs(dense, random or 1, seed)
    else:
        source = images_for_model(dense.model, images, samples=samples, seed=seed)
        given = given_from_images(source, None if labels is None else labels_from_path(labels, source, dense.model))
    with out.progress("verifying", len(steps), unit="links") as done:
        proof = prove(
            dense,
            steps,
            given,
            batches=batch,
            limits=ParityLimits(min_agreement=min_agreement, max_error=max_error, half_factor=half_factor),
            moments=None if moments is None else load_moments(moments),
            done=done,
        )
    save_proof(proof, output)
    if proof.parity.verdict == "UNJUDGED":
        out.warn("nothing was judged: give --min-agreement or --max-error, or judge the record with gate --fail-if")
    out.result(proof.parity.to_json(), parity_table(proof.parity), *located_lines(proof.parity), proof.parity.line)
    ctx.exit(EXIT_CODES[proof.parity.verdict])
