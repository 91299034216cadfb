"""corp-deploy perplexity."""

from pathlib import Path
from typing import Annotated

import click

from corp_deploy.invocation.inputs import RequiredInputs
from corp_deploy.invocation.proof import LanguageOptions
from corp_deploy.views.console import Output
from ground.quantity import BATCH

from .command import command, some
from .model_choice import ModelChoice
from .options import ANY_PATH, FILE, Value


@command(first="weights text tokens samples batch max-ratio min-agreement max-kl confidence output")
@click.argument("model", metavar="DENSE")
@click.argument("candidates", nargs=-1, type=ANY_PATH)
@click.option("--batch", type=Value(BATCH), default=1, show_default=True, help="Sequences run at once.")
@click.option("--output", "-o", type=FILE, default=None, help="Record to write (.json).")
def perplexity(
    model: ModelChoice,
    candidates: tuple[Path, ...],
    inputs: Annotated[RequiredInputs, some("text", "tokens", "samples", "seed")],
    batch: int,
    options: LanguageOptions,
    output: Path | None,
    out: Output,
) -> int:
    """Measure how well decoders predict a held-out text. CANDIDATES are compared with DENSE, token by token.

    DENSE is hf:DIR or a directory written by corp-deploy, CANDIDATES are such directories and their graphs. No labels
    are needed: models predict the text's next token. The output has the perplexity, its ratio to the dense model's on
    the same sequences, the share of tokens with the same most likely next token, and the KL divergence in nats a token,
    each with its interval over sequences. A limit is met if no part of the interval breaks it, and broken (exit 1) if
    all of it does; in between, and with too few sequences for an interval, it is INCONCLUSIVE (exit 3).

    Example: corp-deploy perplexity hf:opt-1.3b reduced --text held-out.txt --max-ratio 1.05 -o perplexity.json
    """
    from corp_deploy.proof.candidates import candidate_from_path
    from corp_deploy.proof.chain import EXIT_CODES
    from corp_deploy.proof.perplexity import LanguageLimits, perplexities
    from corp_deploy.views.decoders import perplexity_line, perplexity_table, reason_lines
    from ground.files import write_json
    from perf.parity.perplexity import LEAST_SEQUENCES

    limits, dense = LanguageLimits.from_options(options.values), model.load(out)
    steps = [candidate_from_path(path) for path in candidates]
    sequences = inputs.open(dense)
    if limits.some and limits.confidence and sequences.count < LEAST_SEQUENCES:
        out.warn(
            f"{sequences.count} {sequences.noun} have no interval, so that no limit is decided: {LEAST_SEQUENCES} are "
            "needed, or --confidence 0, where the point alone decides"
        )
    with out.progress("reading", sequences.count, unit=sequences.noun) as bar:
        proof = perplexities(dense, steps, sequences, limits, batch=batch, on_progress=bar)
    if proof.fitted is not None and proof.fitted.has_overlap:
        out.warn(proof.fitted.warning)
    record = proof.as_json()
    if output is not None:
        write_json(output, record)
    out.result(record, perplexity_table(proof), *reason_lines(proof), perplexity_line(proof))
    return EXIT_CODES[proof.verdict] if limits.some else 0
