"""Pictures of docs/, drawn from the records as SVG files for light and dark pages.

python -m benchmarks.pages.pictures            writes docs/pictures
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from markupsafe import Markup

from perf.report.svg import WIDTH, Drawing, bar, dot, grid_x, group, legend, linear_scale, path, text

from .error_picture import more_data, real_encoder

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures"
ROW = 34


def _record(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def cpu_latency() -> Drawing:
    """Draw the speed-ups with their intervals and the A/A run, a row for each model and batch."""
    rows = [
        (f"{record['model']} {record['heads']}, {record['macs_share']:.0%} of the MACs, batch {each['batch']}", each)
        for record in _record("cpu_latency")["rows"]
        for each in record["rows"]
    ]
    left, right, top = 14, WIDTH - 14, 58
    bottom = top + ROW * len(rows)
    values = [bound for _, each in rows for key in ("speedup", "noise") for bound in each[key] if bound is not None]
    x = linear_scale(values, start=left, end=right, zero=False)
    marks = [
        legend([("reduced", "reduced"), ("dense against itself", "dense")]),
        grid_x(x, top - 8, bottom, "speed-up"),
    ]
    for place, (name, each) in enumerate(rows):
        y = top + ROW * place + 20
        marks.append(text(left, y - 9, name, css="name"))
        marks += [
            _interval(each[key], x.at, y, tone, name) for key, tone in (("noise", "dense"), ("speedup", "reduced"))
        ]
    title = "ONNX Runtime on two CPU cores: speed-up of reduced models with 95 % intervals, beside the machine's noise"
    return Drawing(title=title, height=bottom + 44, marks=tuple(marks))


def _interval(value: list[float | None], at: Callable[[float], float], y: float, tone: str, name: str) -> Markup:
    middle, low, high = value
    assert middle is not None, name
    known = "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
    marks = [dot(at(middle), y, tone, 3.5)]
    if low is not None and high is not None:
        marks.append(
            path(f"whisker {tone}", f"M{at(low):.1f} {y - 4:.1f}v8M{at(low):.1f} {y:.1f}H{at(high):.1f}m0 -4v8")
        )
    return group(f"{name}: {middle:.2f}{known}", *marks)


def fused_attention() -> Drawing:
    """Draw the number of fused attention kernels and of all kernels by head geometry."""
    rows = [row for row in _record("engines")["rows"] if row["model"] == "DeiT-S"]
    left, right, top = 78, WIDTH - 14, 34
    most = max(row["kernels"] for row in rows)
    marks = [legend([("blocks with fused attention", "reduced"), ("kernels in the plan", "dense")])]
    for place, row in enumerate(rows):
        y, share = top + place * 46, row["fused_attention"] / row["blocks"]
        marks.append(text(left - 8, y + 24, row["variant"], anchor="end", css="name"))
        for number, (part, tone, words) in enumerate(
            (
                (share, "reduced", f"{row['fused_attention']} of {row['blocks']}"),
                (row["kernels"] / most, "dense", f"{row['kernels']}"),
            )
        ):
            at, end = y + 4 + 17 * number, left + part * (right - left - 60)
            marks.append(bar(tone, (left, max(end, left + 1)), (at, at + 13), 2))
            marks.append(text(max(end, left + 1) + 6, at + 11, words))
    title = "TensorRT-RTX plans of DeiT-S at half the widths, FP16: fused attention and kernels by head geometry"
    return Drawing(title=title, height=top + 46 * len(rows) + 8, marks=tuple(marks))


DRAWINGS: Mapping[str, Callable[[], Drawing]] = {
    "cpu-latency.svg": cpu_latency,
    "fused-attention.svg": fused_attention,
    "real-encoder.svg": lambda: real_encoder(_record("real_vit")),
    "more-data.svg": lambda: more_data(_record("more_data")),
}


@click.command()
def main() -> None:
    """Write all pictures."""
    PICTURES.mkdir(exist_ok=True)
    for name, drawn in DRAWINGS.items():
        (PICTURES / name).write_text(drawn().standalone, encoding="utf-8")


if __name__ == "__main__":
    main()
