"""The tables of the parts `variants` and `real`. Read the records alone."""

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.goals import done
from benchmarks.gpu.tables import machine
from benchmarks.pages.markdown import interval, table

Record = Mapping[str, Any]
Row = Mapping[str, Any]
DENSE, AGAIN = "dense", "dense again"
ABOUT = {
    "bf16": "BF16",
    "merging": "merged tokens",
    "eight bits": "eight bits",
    "convnet": "convolutional network",
}


def variants(record: Record) -> str:
    """A line a subject, each against the dense model of its own row."""
    rows = []
    for row in sorted(done(record["rows"], row="variant"), key=lambda row: (row["about"], row["model"], row["batch"])):
        head = [ABOUT[row["about"]], row["model"], row["precision"], row["mode"], str(row["batch"])]
        rows += [[*head, *_line(row, name)] for name in (*row["macs"], AGAIN) if name in row["subjects"]]
        rows += [[*head, name, "-", "-", "-", "refused"] for name in row["refused"]]
    names = [
        "what",
        "model",
        "rest in",
        "called by",
        "batch",
        "subject",
        "of the MACs",
        "p50 ms",
        "images/s",
        "speed-up",
    ]
    text = (
        f"BF16, merged tokens, 8-bit matrix products and convolutional networks, {machine(record)}. 8-bit products are "
        "torch's own on the tensor cores, with one scale per tensor and compiled blocks, without an engine:"
    )
    return f"{text}\n\n{table(names, rows)}"


def _line(row: Row, name: str) -> list[str]:
    found = row["subjects"][name]
    share = row["macs"].get(name, row["macs"][DENSE]) / row["macs"][DENSE]
    p50 = f"{found['p50_ms'][0]:.3f}"
    return [name, f"{share:.0%}", p50, f"{found['images_per_s_compute']:.0f}", interval(found["speedup"])]


def real(record: Record) -> str:
    """Return the lines on the device and on the reductions."""
    lines = [f"A DINOv2 ViT-S/14 with its real weights in half precision, on photographs, {machine(record)}."]
    for row in done(record["rows"], row="subject"):
        lines.append(
            f"Fitted to {row['images']} crops of {row['photographs']} photographs, judged on {row['held_out_images']} "
            f"of {row['held_out_photographs']} others; one calibration takes {row['seconds']:.1f} s."
        )
    reductions = sorted(
        done(record["rows"], row="reduction"), key=lambda row: (-row["share"], row["widths"], row["loop"])
    )
    if reductions:
        cells = [
            [f"{row['share']:.0%}", row["widths"], f"{row['loop']} loop", *_errors(row), f"{row['seconds']:.1f}"]
            for row in reductions
        ]
        head = ["of the MACs", "widths", "loop", "class error", "patch error", "saliency IoU", "s"]
        lines += ["", "Relative errors on the photographs held out, preset best:", "", table(head, cells)]
    return "\n".join(lines)


def _errors(row: Row) -> list[str]:
    return [f"{row['class_error']:.4f}", f"{row['patch_error']:.4f}", f"{row['saliency_iou']:.3f}"]
