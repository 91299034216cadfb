"""What a decoder and what was made of it tell of a text, on the terminal."""

from rich.table import Table

from corp_deploy.proof.perplexity import LanguageProof
from perf.parity.perplexity import Range


def _shown(value: Range, form: str) -> str:
    if value.low is None or value.high is None:
        return format(value.value, form)
    return f"{value.value:{form}} ({value.low:{form}} to {value.high:{form}})"


def perplexity_table(proof: LanguageProof) -> Table:
    """One row a model, with intervals over sequences."""
    table = Table("model", "perplexity", "of the dense one's", "token agreement", "KL, nats a token", "verdict")
    for row in proof.rows:
        verdict, _ = proof.verdicts.get(row.model, ("", ""))
        against = (_shown(row.ratio, ".4f"), _shown(row.agreement, ".2%"), _shown(row.kl, ".3g"))
        table.add_row(
            row.model,
            _shown(row.perplexity, ".4g"),
            *(against if row.model in proof.verdicts else ("", "", "")),
            verdict,
        )
    return table


def reason_lines(proof: LanguageProof) -> list[str]:
    """Why each verdict is what it is."""
    return [f"{model}: {why}" for model, (_, why) in proof.verdicts.items() if why]


def perplexity_line(proof: LanguageProof) -> str:
    """The verdict, and on how much."""
    first = proof.rows[0]
    verdict = "measured without a limit" if proof.verdict == "UNJUDGED" else proof.verdict
    return f"{verdict} on {first.tokens:,} tokens of {first.sequences} sequences"
