"""Decoders on the terminal: parity, speed and caches of their graphs, and their perplexities."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from corp_deploy.proof.decoder_parity import DecoderParity
from corp_deploy.proof.perplexity import LanguageProof
from ground.quantity import format_number
from perf.parity.perplexity import Range
from perf.record.decoders import DecoderBench, KvCache
from perf.stats.summary import summarise

from .speed import interval, median_cell, noise_caption, ratio_cells, row_figures, throughputs


def bytes_in_words(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if float(f"{size:.3g}") < 1000:
            return f"{format_number(size, 3)} {unit}"
        size /= 1000
    return f"{format_number(size, 3)} GB"


def cache_record(cache: KvCache, *, length: int, batch: int) -> dict[str, Any]:
    own = asdict(cache) | {"token_bytes": cache.token_bytes, "length": length, "batch": batch}
    return own | {"size_bytes": cache.size_bytes(length=length, batch=batch)}


def cache_table(caches: Mapping[str, KvCache], *, length: int, batch: int) -> Table:
    table = Table("cache", "layers", "groups", "head", "a token", f"{batch} x {length} tokens", "share")
    first = next(iter(caches.values()))
    for name, cache in caches.items():
        sizes = (cache.token_bytes, cache.size_bytes(length=length, batch=batch))
        shape, share = (cache.layers, cache.groups, cache.head), cache.token_bytes / first.token_bytes
        table.add_row(name, *map(str, shape), *map(bytes_in_words, sizes), f"{share:.2f}")
    return table


def decoder_parity_table(parity: DecoderParity) -> Table:
    table = Table("graph against transformers", "relative error", "largest", "tokens agreeing", "bound", "")
    for link in parity.links:
        found = link.measures
        cells = [_scientific(found["relative_error"]), _scientific(found["max_abs"]), f"{found['token_agreement']:.2%}"]
        bound = "-" if link.bound is None else f"{link.bound:.1e}"
        table.add_row(link.name, *cells, bound, link.status)
    return table


def _scientific(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"


def decoder_record(record: DecoderBench) -> dict[str, Any]:
    """Return the figures of prefill, decoding and caches as JSON values, those with an interval as value, low, high."""
    decode = summarise(record.decode).rows  # a call gives one token of each sequence
    return {
        "prefill": [{"length": each.length, **row_figures(summarise(each.bench).rows[0])} for each in record.prefill],
        "cached": record.cached,
        "decode": [{"batch": row.batch, **row_figures(row), "tokens_per_s": throughputs(row)} for row in decode],
        "cache_token_bytes": {name: cache.token_bytes for name, cache in record.caches.items()},
        "warnings": list(record.warnings),
    }


def prefill_table(record: DecoderBench) -> Table:
    one, other = (subject.name for subject in record.decode.subjects)
    table = Table("prompt", f"{one} p50 ms", f"{other} p50 ms", "speed-up", "A/A noise", **noise_caption(one))
    for each in record.prefill:
        row = summarise(each.bench).rows[0]
        medians = (median_cell(row.sides[name]) for name in (one, other))
        table.add_row(f"{each.length} tokens", *medians, *ratio_cells(row))
    return table


def decode_table(record: DecoderBench) -> Table:
    one, other = (subject.name for subject in record.decode.subjects)
    rates = (f"{one} tokens/s", f"{other} tokens/s")
    table = Table("decoding", "cached", *rates, "speed-up", "A/A noise", **noise_caption(one))
    for row in summarise(record.decode).rows:
        sides = [row.sides[name] for name in (one, other)]
        cells = [interval(side.throughput, ",.0f") if side.status == "ok" else side.status for side in sides]
        table.add_row(f"batch {row.batch}", str(record.cached), *cells, *ratio_cells(row))
    return table


def _shown(value: Range, show: Callable[[float], str]) -> str:
    if value.low is None or value.high is None:
        return show(value.value)
    return f"{show(value.value)} ({show(value.low)} to {show(value.high)})"


def perplexity_shown(proof: LanguageProof) -> list[RenderableType]:
    table = Table("model", "perplexity", "of the dense one's", "token agreement", "KL, nats a token", "verdict")
    for row in proof.rows:
        against = [""] * 4
        if row.model in proof.verdicts:
            forms = ((row.ratio, "{:.4f}"), (row.agreement, "{:.2%}"), (row.kl, "{:.3g}"))
            against = [_shown(value, form.format) for value, form in forms]
            against.append(proof.verdicts[row.model][0])
        table.add_row(row.model, _shown(row.perplexity, lambda value: format_number(value, 4)), *against)
    reasons = [f"{model}: {why}" for model, (_, why) in proof.verdicts.items() if why]
    first, verdict = proof.rows[0], "measured without a limit" if proof.verdict == "UNJUDGED" else proof.verdict
    return [table, *reasons, f"{verdict} on {first.tokens:,} tokens of {first.sequences} sequences"]
