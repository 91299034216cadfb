"""Tables of the cost of calibration, reduction and verification."""

from benchmarks.pages.markdown import Column, Row, paragraphs, table, table_of


def passes(record: Row) -> str:
    """Return the table of the commands' costs in bare forward passes; the faster of two passes counts."""
    kwargs = "".join(f", {name} {value}" for name, value in record["model_kwargs"].items())
    text = (
        f"CPU time in bare forward passes over the same images: {record['model']}{kwargs}, {record['images']} images, "
        f"batch {record['batch_size']}, {record['threads']} threads, {record['cpu']}:"
    )
    uniform = f"`reduce --mlp {record['sparsity']:g} --attn {record['sparsity']:g}"
    commands = {
        "calibrate": "`calibrate`",
        "uniform": f"{uniform}`",
        "macs": f"`reduce --macs {record['share_of_macs']:g}`",
        "loop": f"{uniform} --closed-loop`",
        "macs and loop": f"`reduce --macs {record['share_of_macs']:g} --closed-loop`",
    }
    rows = [[words, f"{record['passes'][row]:.1f}"] for row, words in commands.items() if row in record["passes"]]
    return paragraphs(text, table(["command", "passes"], rows))


def workers(record: Row) -> str:
    """Return the table of rates by the number of workers."""
    before, after = record["load_average"]
    text = (
        f"Images per second of {record['model']} at {record['size']} pixels, {record['images']} images, from the first "
        "batch to the written moments, the merge of all parts included; medians of "
        f"{record['rounds']} interleaved rounds on {record['cpus']} CPUs, {record['cpu']}. One process has a thread "
        "for each CPU, workers have one thread each. The load average by this and other programs was "
        f"{before:.1f} before and {after:.1f} at the end:"
    )
    columns: dict[str, Column] = {
        "way": "{way}",
        "workers": "{workers}",
        "images per second": "{images_per_s:.1f}",
        "of one process": "{ratio:.2f}",
    }
    return paragraphs(text, table_of(record["rows"], columns))


def proof_cost(record: Row) -> str:
    """Return the cost of `verify` against that of the passes that it needs."""
    verify = record["verify"]
    return (
        f"`verify` of {record['model']}, the model with half of its widths, and its FP32 and FP16 graphs, on "
        f"{record['images']} images at batch sizes {', '.join(map(str, record['batches']))}, {record['threads']} "
        f"threads, {record['cpu']}: {verify['cpu_s']:.0f} CPU seconds and {verify['peak_mb'] / 1e3:.1f} GB. This is "
        f"{record['ratio']:.2f} times the cost of the necessary passes (one of each of the four, and one of the dense "
        "model in FP16)."
    )
