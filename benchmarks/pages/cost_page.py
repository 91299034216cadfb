"""What calibrating, reducing and proving cost, by their records."""

from typing import Any

from benchmarks.pages.markdown import table


def passes(record: dict[str, Any]) -> str:
    """What a command costs beside a forward pass over the same images, which is the faster of the two bare ones."""
    kwargs = "".join(f", {name} {value}" for name, value in record["model_kwargs"].items())
    text = (
        f"CPU time in bare forward passes over the same images: {record['model']}{kwargs}, {record['images']} images, "
    )
    text += f"batch {record['batch_size']}, {record['threads']} threads, {record['cpu']}:"
    commands = {
        "calibrate": "`calibrate`",
        "uniform": f"`reduce --mlp {record['sparsity']:g} --attn {record['sparsity']:g}`",
        "macs": f"`reduce --macs {record['share_of_macs']:g}`",
        "loop": f"`reduce --mlp {record['sparsity']:g} --attn {record['sparsity']:g} --closed-loop`",
        "macs and loop": f"`reduce --macs {record['share_of_macs']:g} --closed-loop`",
    }
    rows = [[words, f"{record['passes'][row]:.1f}"] for row, words in commands.items() if row in record["passes"]]
    return text + "\n\n" + table(["command", "passes"], rows)


def proof_cost(record: dict[str, Any]) -> str:
    """What a proof costs beside the passes that it can't do without."""
    verify = record["verify"]
    return (
        f"Verifying {record['model']}, its half and the half's FP32 and FP16 graphs on {record['images']} images at "
        f"batches {', '.join(map(str, record['batches']))}, {record['threads']} threads, {record['cpu']}: "
        f"{verify['cpu_s']:.0f} CPU seconds, {record['ratio']:.2f} times the passes that it needs in any "
        f"case (one of each of the four, and one of the dense model in FP16), and {verify['peak_mb'] / 1e3:.1f} GB."
    )
