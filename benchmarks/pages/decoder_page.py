"""Tables of decoders: perplexity by method, and their speed in ONNX Runtime."""

from collections.abc import Iterator

from benchmarks.pages.markdown import Column, Row, cross_table, interval, paragraphs, table_of


def trained_decoder(record: Row) -> str:
    """Return the table of a small decoder's perplexity by method."""
    dense, *others = record["rows"]
    text = (
        f"A Llama with three blocks and two query heads per key/value head, trained for {record['training_s']:.0f} s "
        f"on the text of Python's help, letter by letter (perplexity {dense['perplexity']['value']:.2f}). The table "
        "shows the perplexity on held-out text as a multiple of the dense model's perplexity, by removed part and "
        "method:"
    )
    first = {"removed": "{part}", "share": "{sparsity:g}"}
    return paragraphs(text, cross_table(others, first, "{method}", "{ratio[value]:.3f}"))


def _lines(row: Row) -> Iterator[dict[str, str]]:
    for each in row["prefill"]:
        yield {
            "phase": f"prefill, {each['length']} tokens",
            **{name: f"{interval(each['p50_ms'][name])} ms" for name in ("dense", "reduced")},
            "speedup": interval(each["speedup"]),
        }
    for each in row["decode"]:
        yield {
            "phase": f"decoding after {row['cached']} tokens, batch {each['batch']}",
            **{name: f"{interval(each['tokens_per_s'][name], 0)} tokens/s" for name in ("dense", "reduced")},
            "speedup": interval(each["speedup"]),
        }


def decoder_onnx(record: Row) -> str:
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
    columns: dict[str, Column] = {
        "removed": "{name}",
        "phase": "{phase}",
        "dense": "{dense}",
        "reduced": "{reduced}",
        "speed-up": "{speedup}",
    }
    return paragraphs(text, table_of(({"name": row["name"], **line} for row in rows for line in _lines(row)), columns))
