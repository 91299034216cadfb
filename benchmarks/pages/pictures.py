"""The pictures of docs/: drawn from the records, as files of SVG, light and dark.

python -m benchmarks.pages.pictures            writes docs/pictures
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from markupsafe import Markup

from perf.report.svg import WIDTH, Drawing, bar, dot, element, grid_x, group, legend, line, linear, path, text

from .error_picture import real_encoder

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures"
ROW = 34


def _record(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def cpu_latency() -> Drawing:
    """Speed-ups with their intervals, a row a model and batch, and the dense model against itself."""
    rows = [
        (f"{record['model']} {record['heads']}, {record['macs_share']:.0%} of the MACs, batch {each['batch']}", each)
        for record in _record("cpu_latency")["rows"]
        for each in record["rows"]
    ]
    left, right, top = 14, WIDTH - 14, 58
    bottom = top + ROW * len(rows)
    values = [bound for _, each in rows for key in ("speedup", "noise") for bound in each[key] if bound is not None]
    x = linear(values, start=left, end=right, zero=False)
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
    """Blocks whose attention is one kernel, and kernels in all, by head geometry."""
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


def _box(x: float, y: float, width: float, name: str, words: tuple[str, ...], tone: str = "track") -> list[Markup]:
    """A box with a name and lines below it."""
    height = 30 + 15 * len(words)
    frame = element("rect", class_=f"open {tone}", x=x, y=y, width=width, height=height, rx=6)
    below = [text(x + width / 2, y + 36 + 15 * place, each, anchor="middle") for place, each in enumerate(words)]
    return [frame, text(x + width / 2, y + 19, name, anchor="middle", css="name"), *below]


def _arrow(x: tuple[float, float], y: tuple[float, float], words: str = "") -> list[Markup]:
    """From one point to another, with words beside it."""
    down = y[1] > y[0]
    head = f"M{x[1] - 4} {y[1] - 6}l4 6l4 -6" if down else f"M{x[1] - 6} {y[1] - 4}l6 4l-6 4"
    marks = [line("dense", x, y), path("whisker dense", head)]
    return [*marks, text(x[1] + 10, (y[0] + y[1]) / 2 + 4, words)] if words else marks


def pipeline() -> Drawing:
    """From images to a release: what each room does and hands on."""
    steps = (
        ("calib", ("one forward pass, sums in float64",), "moments"),
        ("corp_deploy", ("widths, selection, repair in closed form",), "a smaller model"),
        ("export", ("typed FP32, FP16, BF16, INT8, FP8",), "ONNX graphs, engines"),
        ("perf", ("dense beside reduced, link by link",), "verdict, report"),
    )
    marks: list[Markup] = [text(150, 16, "a trained model, unlabelled images", anchor="middle", css="name")]
    y = 24.0
    for name, words, gives in steps:
        marks += _arrow((150, 150), (y, y + 22))
        marks += _box(10, y + 22, 280, name, words, "reduced")
        y += 67
        marks += [text(304, y, gives, css="name")]
    marks += _arrow((150, 150), (y, y + 22))
    marks += _box(
        10, y + 22, 280, "release", ("report, model card, digests, signature,", "model repository for a server"), "pass"
    )
    title = "From a trained model and images to a release: calibrate, reduce, export, prove and measure"
    return Drawing(title=title, height=y + 92, marks=tuple(marks))


def parity_chain() -> Drawing:
    """The links of a proof, each with its own error and limit."""
    steps = ("dense module", "reduced module", "graph in FP32", "graph in FP16", "engine")
    links = (
        "what the reduction lost: your limit",
        "what the export changed: rounding",
        "what sixteen bits cost: 4 x the dense model's own",
        "what the builder changed",
    )
    marks: list[Markup] = []
    for place, name in enumerate(steps):
        y = 6 + 62 * place
        marks += _box(10, y, 140, name, (), "dense" if place == 0 else "reduced")
        if place < len(links):
            marks += _arrow((80, 80), (y + 30, y + 62), links[place])
    marks.append(path("whisker note", f"M{WIDTH - 24} 20h14V{62 * 4 + 24}h-14"))
    marks.append(text(WIDTH - 32, 24, "the whole: your limit", anchor="end", css="note"))
    title = "The parity chain: each step is held against the one before, and the whole against the dense module"
    return Drawing(title=title, height=62 * 4 + 48, marks=tuple(marks))


DRAWINGS: Mapping[str, Callable[[], Drawing]] = {
    "cpu-latency.svg": cpu_latency,
    "fused-attention.svg": fused_attention,
    "parity-chain.svg": parity_chain,
    "pipeline.svg": pipeline,
    "real-encoder.svg": lambda: real_encoder(_record("real_vit")),
}


@click.command()
def main() -> None:
    """Write every picture."""
    PICTURES.mkdir(exist_ok=True)
    for name, drawn in DRAWINGS.items():
        (PICTURES / name).write_text(drawn().standalone, encoding="utf-8")


if __name__ == "__main__":
    main()
