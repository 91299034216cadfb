"""corp-deploy verify."""

from pathlib import Path
from typing import Any

import click

from ..console import Output, output_options
from .options import (
    ANY_PATH,
    FILE,
    Integers,
    JsonObject,
    ModelChoice,
    images_option,
    samples_option,
    seed_option,
)


@click.command()
@click.argument("reference")
@click.argument("candidates", nargs=-1, required=True, type=ANY_PATH)
@click.option("--weights", type=FILE, help="Weights of REFERENCE when it is a timm name.")
@click.option("--model-kwargs", type=JsonObject(), default=None, help="Arguments of REFERENCE for timm, a JSON object.")
@images_option
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
    "--batch", type=Integers(), default="1,7,32", show_default=True, help="Batch sizes to run every candidate at."
)
@click.option(
    "--min-agreement", type=click.FloatRange(0, 1), default=None, help="Least top-1 agreement with the dense model."
)
@click.option(
    "--max-error", type=click.FloatRange(0), default=None, help="Largest relative logit error of the reduced model."
)
@click.option(
    "--half-factor",
    type=click.FloatRange(1),
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
    reference: str,
    candidates: tuple[Path, ...],
    weights: Path | None,
    model_kwargs: dict[str, Any] | None,
    images: Path,
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

    Give the candidates in the order they were made: reduced directory, FP32 graph, FP16 graph.

    Example: corp-deploy verify dense reduced reduced/model.onnx reduced/model.fp16.onnx --images photos/ -o parity.json
    """
    from ..chain import Limits, candidate_from_path, prove
    from ..inputs import images_for_model, labels_from_path
    from ..proofs import parity_table, save_proof

    dense = ModelChoice(model=reference, weights=weights, kwargs=model_kwargs or {}).load()
    steps = [candidate_from_path(path) for path in candidates]
    source = images_for_model(dense.model, images, samples=samples, seed=seed)
    with out.progress("verifying", len(steps), unit="links") as done:
        proof = prove(
            dense,
            steps,
            source,
            batches=batch,
            limits=Limits(min_agreement=min_agreement, max_error=max_error, half_factor=half_factor),
            labels=None if labels is None else labels_from_path(labels, source),
            done=done,
        )
    save_proof(proof, output)
    out.result(proof.parity.to_json(), parity_table(proof.parity), f"{proof.parity.verdict}: {proof.parity.reason}")
    if proof.parity.verdict == "FAIL":
        ctx.exit(1)
