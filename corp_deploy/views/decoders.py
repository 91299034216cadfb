"""Decoders' graphs on a terminal: what was written, how near it is, how fast, what a cache takes, and what a decoder
and what was made of it tell of a text.
"""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from corp_deploy.proof.decoder_parity import DecoderParity
from corp_deploy.proof.perplexity import LanguageProof
from perf.parity.perplexity import Range
from perf.record.decoders import DecoderBench, KvCache
from perf.stats.summary import Side, SummaryRow, summarise

from .speed import compared, figures, interval, noise_told, p50, ratios


def bytes_in_words(size: float) -> str:
    """As people write sizes: three digits and a unit."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} GB" if size < 1000 else f"{size:,.0f} GB"


def cache_record(cache: KvCache, *, length: int, batch: int) -> dict[str, Any]:
    """What a cache is made of, what it takes a token, and in all."""
    return {
        "layers": cache.layers,
        "groups": cache.groups,
        "head": cache.head,
        "value_bytes": cache.value_bytes,
        "token_bytes": cache.token_bytes,
        "length": length,
        "batch": batch,
        "size_bytes": cache.size_bytes(length=length, batch=batch),
    }


def cache_table(caches: Mapping[str, KvCache], *, length: int, batch: int) -> Table:
    """One row a model; shares are of the first."""
    table = Table("cache", "layers", "groups", "head", "a token", f"{batch} x {length} tokens", "share")
    first = next(iter(caches.values()))
    for name, cache in caches.items():
        table.add_row(
            name,
            str(cache.layers),
            str(cache.groups),
            str(cache.head),
            bytes_in_words(cache.token_bytes),
            bytes_in_words(cache.size_bytes(length=length, batch=batch)),
            f"{cache.token_bytes / first.token_bytes:.2f}",
        )
    return table


def parity_table(parity: DecoderParity) -> Table:
    """One row a way of running it."""
    table = Table("graph against transformers", "relative error", "largest", "tokens agreeing", "bound", "")
    for link in parity.links:
        found = link.measures
        cells = [_scientific(found["relative_error"]), _scientific(found["max_abs"]), f"{found['token_agreement']:.2%}"]
        bound = "-" if link.bound is None else f"{link.bound:.1e}"
        table.add_row(link.name, *cells, bound, link.status)
    return table


def _scientific(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"


def _rates(row: SummaryRow) -> dict[str, list[float | None] | None]:
    """Tokens a second: a call gives one of each sequence."""
    return {name: figures(side.throughput) for name, side in row.sides.items()}


def decoder_record(record: DecoderBench) -> dict[str, Any]:
    """The tables' figures for machines: value, low, high; the raw samples are in the file."""
    decode = summarise(record.decode).rows
    return {
        "prefill": [{"length": each.length, **compared(summarise(each.bench).rows[0])} for each in record.prefill],
        "cached": record.cached,
        "decode": [{"batch": row.batch, **compared(row), "tokens_per_s": _rates(row)} for row in decode],
        "cache_token_bytes": {name: cache.token_bytes for name, cache in record.caches.items()},
        "warnings": list(record.warnings),
    }


def prefill_table(record: DecoderBench) -> Table:
    """One row a length of prompts; 95 % intervals in brackets."""
    one, other = (subject.name for subject in record.decode.subjects)
    table = Table("prompt", f"{one} p50 ms", f"{other} p50 ms", "speed-up", "A/A noise")
    table.caption, table.caption_justify = noise_told(one), "left"
    for each in record.prefill:
        row = summarise(each.bench).rows[0]
        table.add_row(f"{each.length} tokens", p50(row.sides[one]), p50(row.sides[other]), *ratios(row))
    return table


def decode_table(record: DecoderBench) -> Table:
    """One row a batch size."""
    one, other = (subject.name for subject in record.decode.subjects)
    table = Table("decoding", "cached", f"{one} tokens/s", f"{other} tokens/s", "speed-up", "A/A noise")
    table.caption, table.caption_justify = noise_told(one), "left"
    for row in summarise(record.decode).rows:
        rates = [_rate(row.sides[name]) for name in (one, other)]
        table.add_row(f"batch {row.batch}", str(record.cached), *rates, *ratios(row))
    return table


def _rate(side: Side) -> str:
    return interval(side.throughput, ",.0f") if side.status == "ok" else side.status


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
