"""The tables of the parts `variants` and `real` of a GPU run."""

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.goals import done
from benchmarks.gpu.tables import machine
from benchmarks.pages.markdown import Column, Row, interval_of, paragraphs, table_of

Record = Row
DENSE, AGAIN = "dense", "dense again"
ABOUT = {
    "bf16": "BF16",
    "merging": "merged tokens",
    "eight bits": "eight bits",
    "convnet": "convolutional network",
}


def variants(record: Record) -> str:
    """Return a table with a line for each subject, against the dense model of the same measurement."""
    columns: dict[str, Column] = {
        "what": lambda row: ABOUT[row["about"]],
        "model": "{model}",
        "rest in": "{precision}",
        "called by": "{mode}",
        "batch": "{batch}",
        "subject": "{subject}",
        "of the MACs": "{share:.0%}",
        "p50 ms": "{p50:.3f}",
        "images/s": "{images_per_s_compute:.0f}",
        "speed-up": lambda row: "refused" if row["share"] is None else interval_of("speedup")(row),
    }
    rows = [
        {**row, **each}
        for row in sorted(
            done(record["rows"], row="variant"), key=lambda row: (row["about"], row["model"], row["batch"])
        )
        for each in _subjects(row)
    ]
    text = (
        f"BF16, merged tokens, 8-bit matrix products and convolutional networks, {machine(record)}. 8-bit products are "
        "torch's own on the tensor cores, with one scale per tensor and compiled blocks, without an engine:"
    )
    return paragraphs(text, table_of(rows, columns))


def _subjects(row: Row) -> Iterator[dict[str, Any]]:
    """Yield the figures of each subject, then the refused subjects without figures."""
    for name in (each for each in (*row["macs"], AGAIN) if each in row["subjects"]):
        found = row["subjects"][name]
        share = row["macs"].get(name, row["macs"][DENSE]) / row["macs"][DENSE]
        yield {**found, "subject": name, "share": share, "p50": found["p50_ms"][0]}
    for name in row["refused"]:
        yield {"subject": name, **dict.fromkeys(("share", "p50", "images_per_s_compute"))}


def real(record: Record) -> str:
    """Return the lines on the device and on the reductions."""
    lines = [f"A DINOv2 ViT-S/14 with its real weights in half precision, on photographs, {machine(record)}."]
    for row in done(record["rows"], row="subject"):
        lines.append(
            f"Fitted to {row['images']} crops of {row['photographs']} photographs, judged on {row['held_out_images']} "
            f"of {row['held_out_photographs']} others; one calibration takes {row['seconds']:.1f} s."
        )
    reductions = done(record["rows"], row="reduction")
    if not reductions:
        return "\n".join(lines)
    columns: dict[str, Column] = {
        "of the MACs": "{share:.0%}",
        "widths": "{widths}",
        "loop": "{loop} loop",
        "class error": "{class_error:.4f}",
        "patch error": "{patch_error:.4f}",
        "saliency IoU": "{saliency_iou:.3f}",
        "s": "{seconds:.1f}",
    }
    reductions.sort(key=lambda row: (-row["share"], row["widths"], row["loop"]))
    shown = table_of(reductions, columns)
    return paragraphs("\n".join(lines), "Relative errors on the photographs held out, preset best:", shown)
