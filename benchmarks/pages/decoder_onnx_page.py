"""The table of decoders in ONNX Runtime."""

from collections.abc import Mapping
from typing import Any

from benchmarks.pages.markdown import interval, table


def _lines(each: Mapping[str, Any], cached: int) -> list[list[str]]:
    lines = []
    for row in each["prefill"]:
        p50 = [interval(row["p50_ms"][name]) + " ms" for name in ("dense", "reduced")]
        lines.append([each["name"], f"prefill, {row['length']} tokens", *p50, interval(row["speedup"])])
    for row in each["decode"]:
        rates = [interval(row["tokens_per_s"][name], 0) + " tokens/s" for name in ("dense", "reduced")]
        what = f"decoding after {cached} tokens, batch {row['batch']}"
        lines.append([each["name"], what, *rates, interval(row["speedup"])])
    return lines


def decoder_onnx(record: Mapping[str, Any]) -> str:
    """Return the table of speed-ups of prefill and decoding, and the sizes of cache and parameters."""
    model, rows = record["model"], record["rows"]
    worst = max(
        error for row in rows for which in ("dense", "reduced") for error in row[which]["relative_error"].values()
    )
    sizes = "; ".join(
        f"{row['name']}: {row['reduced']['parameters'] / row['dense']['parameters']:.2f} of the parameters, "
        f"{row['caches']['reduced']['token_bytes'] / row['caches']['dense']['token_bytes']:.2f} of the key/value cache "
        f"({row['caches']['reduced']['token_bytes']:,} bytes per token)"
        for row in rows
    )
    loads = ", ".join(f"{row['load_before']:.1f}" for row in rows)
    heads = f"{model['num_attention_heads']} heads in {model['num_key_value_heads']} groups"
    parameters = f"{rows[0]['dense']['parameters'] / 1e6:.1f} M parameters"
    text = (
        f"A Llama with {model['num_hidden_layers']} layers, width {model['hidden_size']}, "
        f"{model['intermediate_size']} MLP channels, {heads}, a vocabulary of {model['vocab_size']:,} ({parameters}) "
        "and random weights, as an FP32 graph of `export-decoder` in ONNX Runtime, dense and reduced interleaved, on "
        f"{record['threads']} threads of a shared {record['cpu']} (load average before each run {loads}). "
        f"{sizes[0].upper()}{sizes[1:]}. The relative error of the logits against transformers is at most {worst:.1e}, "
        "as a prefill and token by token."
    )
    lines = [line for row in rows for line in _lines(row, row["cached"])]
    return text + "\n\n" + table(["removed", "phase", "dense", "reduced", "speed-up"], lines)
