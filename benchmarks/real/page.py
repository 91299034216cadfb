"""The tables of a record of real_vit.py, real_vit_engines.py, real_convnet.py and efforts.py."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.pages.markdown import Column, interval, table, table_of

SHOWN_SHARE = 0.8
Row = Mapping[str, Any]
FIGURES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "macs_share": ("MACs", "{:.2f}".format),
    "class_error": ("class token", "{:.3f}".format),
    "patch_error": ("patch tokens", "{:.3f}".format),
    "cosine_mean": ("cosine", "{:.3f}".format),
    "cosine_low": ("lowest 1 %", "{:.3f}".format),
    "saliency_error": ("saliency", "{:.3f}".format),
    "saliency_iou": ("IoU", "{:.3f}".format),
    "neighbour_agreement": ("neighbours", "{:.0%}".format),
    "cpu_s": ("CPU s", "{:.0f}".format),
    "passes": ("passes", "{:.1f}".format),
}


def _by_share(rows: Sequence[Row]) -> str:
    """Return a table of the class token's errors with a row for each method."""
    shares = sorted({row["share"] for row in rows}, reverse=True)
    errors = {(row["method"], row["share"]): f"{row['class_error']:.3f}" for row in rows}
    methods = dict.fromkeys(row["method"] for row in rows)
    lines = [[method, *(errors.get((method, share), "-") for share in shares)] for method in methods]
    return table(["share of the MACs", *(f"{share:g}" for share in shares)], lines)


def _figures(rows: Sequence[Row]) -> str:
    """Return a table of all figures of the rows at one share."""
    lines = [
        [row["method"], *("-" if row[name] is None else words(row[name]) for name, (_, words) in FIGURES.items())]
        for row in rows
        if row["share"] == SHOWN_SHARE
    ]
    return table([f"at {SHOWN_SHARE:g} of the MACs", *(name for name, _ in FIGURES.values())], lines)


def _photographs(rows: Sequence[Row]) -> str:
    """Return a table of errors on the calibration crops and on held-out crops, by the number of photographs."""
    counts = sorted({row["photographs"] for row in rows})
    cells = {
        (row["method"], row["photographs"]): f"{row['fitted_class_error']:.3f} / {row['class_error']:.3f}"
        for row in rows
    }
    methods = dict.fromkeys(row["method"] for row in rows)
    lines = [[method, *(cells.get((method, count), "-") for count in counts)] for method in methods]
    return table(["photographs", *map(str, counts)], lines)


def _threads(record: Mapping[str, Any]) -> str:
    count = record["threads"]
    return f"{count} thread{'s'[: count > 1]}"


def real_vit(record: Mapping[str, Any]) -> str:
    """Return the tables of all methods on real weights."""
    calibration, held_out = record["calibration"], record["held_out"]
    rows = record["rows"]
    text = (
        f"**A real {record['model']}** (`make real`), calibrated on {calibration['crops']} crops of "
        f"{calibration['photographs']} photographs, judged on {held_out['crops']} crops of {held_out['photographs']} "
        "others: relative error of the class token, ‖reduced − dense‖ / ‖dense‖, by the share of the dense MACs. "
        "Presets use the smallest uniform sparsity of MLPs and Q/K that leaves at most that share; `by site` is "
        "`--macs`:"
    )
    parts = [text, _by_share(rows)]
    if any(row["share"] == SHOWN_SHARE for row in rows):
        more = (
            "All figures: errors of class and patch tokens, cosine of patch tokens (mean and 1 % quantile), error and "
            "overlap of the maps of an unchanged saliency head, images with the same nearest neighbour, CPU seconds of "
            f"`reduce` with {_threads(record)}, and the same cost in bare forward passes over the calibration crops:"
        )
        parts += [more, _figures(rows)]
    if record.get("photographs"):
        (share,) = {row["share"] for row in record["photographs"]}
        parts.append(
            f"Over-fitting: the class token's error at {share:g} of the MACs, uniform widths, on the calibration crops "
            "/ on held-out crops, by the number of photographs:"
        )
        parts.append(_photographs(record["photographs"]))
    return "\n\n".join([*parts, *record.get("remarks", [])])


def real_vit_engines(record: Mapping[str, Any]) -> str:
    """Return the tables of latencies and engines."""
    lines = []
    engines = [("dense", record["dense_engine"]), *((row["name"], row["engine"]) for row in record["rows"])]
    for row in record["rows"]:
        head = [row["name"], f"{row['macs_share']:.2f}", f"{row['class_error']:.3f}"]
        for line in row["latency"]["rows"]:
            p50 = [interval(line["p50_ms"][side], 1) for side in ("dense", "reduced")]
            rates = [interval(line["images_per_s"][side], 1) for side in ("dense", "reduced")]
            lines.append([*head, str(line["batch"]), *p50, *rates, interval(line["speedup"], 2)])
    text = (
        f"ONNX Runtime, FP32, {_threads(record)} of an {record['cpu']}, each model interleaved with the dense model in "
        "one process (95 % intervals in brackets):"
    )
    names = [
        "model",
        "MACs",
        "class token",
        "batch",
        "dense p50 ms",
        "p50 ms",
        "dense images/s",
        "images/s",
        "speed-up",
    ]
    parts = [text, table(names, lines)]
    if all(engine is not None for _, engine in engines):
        parts.append("The same as TensorRT-RTX engines, FP16, SM86, built without a GPU:")
        parts.append(table(["model", "fused attention", "kernels", "plan MB"], map(_engine, engines)))
    return "\n\n".join([*parts, *record.get("remarks", [])])


def _engine(named: tuple[str, Mapping[str, Any]]) -> list[str]:
    name, engine = named
    fused = f"{engine['fused_attention']} of {len(engine['attention_sites'])}"
    return [name, fused, str(engine["kernels"]), f"{engine['plan_bytes'] / 1e6:.1f}"]


def efforts(record: Mapping[str, Any]) -> str:
    """Return the error on held-out inputs and the cost of each effort."""
    text = (
        f"`reduce --effort` with preset `best`, calibrated on {record['crops']} crops (MiniLM: 312 texts) and judged "
        f"on {record['held_out']} others. The table has the relative error of the outputs over all inputs and of the "
        "median input, both also on crops of 30 photographs of another kind, and on the calibration inputs; the errors "
        "by which `standard` chose, on inputs that it held out; and the cost in bare forward passes over the "
        "calibration inputs:"
    )
    absent = dict.fromkeys(("median_error", "more_error", "more_median_error", "fitted_error"))
    rows = [{**absent, **row, "said": _stages(row)} for row in record["rows"]]
    columns: dict[str, Column] = {
        "model": "{model}",
        "asked": "{asked}",
        "effort": "{effort}",
        "error": "{error:.3f}",
        "median": "{median_error:.3f}",
        "30 more photographs": "{more_error:.3f}",
        "median of these": "{more_median_error:.3f}",
        "on calibration inputs": "{fitted_error:.3f}",
        "stages": "{said}",
        "passes": "{passes:.1f}",
    }
    return "\n\n".join([text, table_of(rows, columns), *record.get("remarks", [])])


def more_data(record: Mapping[str, Any]) -> str:
    """Return the error by the numbers of photographs and crops, on each set of judging photographs."""
    text = (
        f"DINOv2-S at {record['share']:g} of the multiply-adds, calibrated on crops of 37 large photographs, or of "
        "these and 260 others. Relative error of the class token, and that of the median crop in brackets, on crops of "
        "the 16 photographs that judge every table here, on crops of 30 of the other kind, and on 256 crops of the fit:"
    )
    columns: dict[str, Column] = {
        "reduced by": "{how}",
        "photographs": "{photographs}",
        "crops": "{crops:,}",
        "16 photographs": "{error:.3f} ({median_error:.3f})",
        "30 others": "{more_error:.3f} ({more_median_error:.3f})",
        "crops of the fit": "{fitted_error:.3f} ({fitted_median_error:.3f})",
        "CPU s of `reduce`": "{cpu_s:.0f}",
    }
    picture = "![Error of the class token by the images of the fit](../pictures/more-data.svg)"
    return "\n\n".join([text, table_of(record["rows"], columns), picture, *record.get("remarks", [])])


def _stages(row: Row) -> str | None:
    return ", ".join(f"{stage['name']} {stage['error']:.3f}" for stage in row["stages"]) or None


def real_convnet(record: Mapping[str, Any]) -> str:
    """Return a table with a row for each method and a column for each share of the MACs."""
    rows = record["rows"]
    shares = sorted({row["share"] for row in rows}, reverse=True)
    by_key = {(row["method"], row["share"]): row for row in rows}

    def cell(method: str, share: float) -> str:
        row = by_key.get((method, share))
        return "-" if row is None else f"{row['error']:.3f}, {row['agreement']:.1%}"

    def cost(method: str) -> str:
        row = by_key.get((method, shares[0]))
        return "-" if row is None else f"{row['cpu_s']:.0f}"

    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = [[method, *(cell(method, share) for share in shares), cost(method)] for method in methods]
    text = (
        f"A convolutional network, {record['model']}, with ImageNet weights, calibrated on {record['crops']} crops and "
        f"judged on {record['held_out']} crops of other photographs. Relative error of the logits and agreement of the "
        f"top class with the dense model, by the share of the MACs; CPU seconds of `reduce` at {shares[0]:g} on "
        f"{record['cpu']}, {record['threads']} thread(s):"
    )
    head = ("method", *(f"{share:g} of the MACs" for share in shares), "CPU s")
    return "\n\n".join([text, table(head, lines), *record.get("remarks", [])])
