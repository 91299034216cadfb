"""The tables of a record of real_vit.py, real_vit_engines.py, real_convnet.py, efforts.py and more_data.py."""

from collections.abc import Sequence

from benchmarks.pages.markdown import Column, Row, cross_table, interval_of, paragraphs, table, table_of

SHOWN_SHARE = 0.8
FIGURES: dict[str, Column] = {
    f"at {SHOWN_SHARE:g} of the MACs": "{method}",
    "MACs": "{macs_share:.2f}",
    "class token": "{class_error:.3f}",
    "patch tokens": "{patch_error:.3f}",
    "cosine": "{cosine_mean:.3f}",
    "lowest 1 %": "{cosine_low:.3f}",
    "saliency": "{saliency_error:.3f}",
    "IoU": "{saliency_iou:.3f}",
    "neighbours": "{neighbour_agreement:.0%}",
    "CPU s": "{cpu_s:.0f}",
    "passes": "{passes:.1f}",
}


def _shares(rows: Sequence[Row], form: str) -> list[str]:
    """Return headings of the shares of the MACs, the largest first."""
    return [form.format(share=share) for share in sorted({row["share"] for row in rows}, reverse=True)]


def _threads(record: Row) -> str:
    count = record["threads"]
    return f"{count} thread{'s'[: count > 1]}"


def real_vit(record: Row) -> str:
    """Return the tables of all methods on real weights."""
    calibration, held_out = record["calibration"], record["held_out"]
    rows, photographs = record["rows"], record.get("photographs", ())
    text = (
        f"**A real {record['model']}** (`make real`), calibrated on {calibration['crops']} crops of "
        f"{calibration['photographs']} photographs, judged on {held_out['crops']} crops of {held_out['photographs']} "
        "others: relative error of the class token, ‖reduced − dense‖ / ‖dense‖, by the share of the dense MACs. "
        "Presets use the smallest uniform sparsity of MLPs and Q/K that leaves at most that share; `by site` is "
        "`--macs`:"
    )
    form, first = "{share:g}", {"share of the MACs": "{method}"}
    parts = [text, cross_table(rows, first, form, "{class_error:.3f}", _shares(rows, form))]
    if shown := [row for row in rows if row["share"] == SHOWN_SHARE]:
        more = (
            "All figures: errors of class and patch tokens, cosine of patch tokens (mean and 1 % quantile), error and "
            "overlap of the maps of an unchanged saliency head, images with the same nearest neighbour, CPU seconds of "
            f"`reduce` with {_threads(record)}, and the same cost in bare forward passes over the calibration crops:"
        )
        parts += [more, table_of(shown, FIGURES)]
    if photographs:
        (share,) = {row["share"] for row in photographs}
        over_fitting = (
            f"Over-fitting: the class token's error at {share:g} of the MACs, uniform widths, on the calibration crops "
            "/ on held-out crops, by the number of photographs:"
        )
        counts = map(str, sorted({row["photographs"] for row in photographs}))
        both = "{fitted_class_error:.3f} / {class_error:.3f}"
        parts += [over_fitting, cross_table(photographs, {"photographs": "{method}"}, "{photographs}", both, counts)]
    return paragraphs(*parts)


def real_vit_engines(record: Row) -> str:
    """Return the tables of latencies and engines."""
    text = (
        f"ONNX Runtime, FP32, {_threads(record)} of an {record['cpu']}, each model interleaved with the dense model in "
        "one process (95 % intervals in brackets):"
    )
    columns: dict[str, Column] = {
        "model": "{name}",
        "MACs": "{macs_share:.2f}",
        "class token": "{class_error:.3f}",
        "batch": "{batch}",
        "dense p50 ms": interval_of("p50_ms.dense", 1),
        "p50 ms": interval_of("p50_ms.reduced", 1),
        "dense images/s": interval_of("images_per_s.dense", 1),
        "images/s": interval_of("images_per_s.reduced", 1),
        "speed-up": interval_of("speedup"),
    }
    parts = [text, table_of([{**row, **line} for row in record["rows"] for line in row["latency"]["rows"]], columns)]
    engines = {"dense": record["dense_engine"], **{row["name"]: row["engine"] for row in record["rows"]}}
    if None not in engines.values():
        parts.append("The same as TensorRT-RTX engines, FP16, SM86, built without a GPU:")
        lines = [
            (name, f"{engine['fused_attention']} of {len(engine['attention_sites'])}", str(engine["kernels"]),
             f"{engine['plan_bytes'] / 1e6:.1f}")
            for name, engine in engines.items()
        ]  # fmt: skip
        parts.append(table(("model", "fused attention", "kernels", "plan MB"), lines))
    return paragraphs(*parts)


def efforts(record: Row) -> str:
    """Return the error on held-out inputs and the cost of each effort."""
    text = (
        f"`reduce --effort` with preset `best`, calibrated on {record['crops']} crops (MiniLM: 312 texts) and judged "
        f"on {record['held_out']} others. The table has the relative error of the outputs over all inputs and of the "
        "median input, both also on crops of 30 photographs of another kind, and on the calibration inputs; the errors "
        "by which `standard` chose, on inputs that it held out; and the cost in bare forward passes over the "
        "calibration inputs:"
    )
    absent = dict.fromkeys(("median_error", "more_error", "more_median_error", "fitted_error"))
    columns: dict[str, Column] = {
        "model": "{model}",
        "asked": "{asked}",
        "effort": "{effort}",
        "error": "{error:.3f}",
        "median": "{median_error:.3f}",
        "30 more photographs": "{more_error:.3f}",
        "median of these": "{more_median_error:.3f}",
        "on calibration inputs": "{fitted_error:.3f}",
        "stages": lambda row: ", ".join(f"{stage['name']} {stage['error']:.3f}" for stage in row["stages"]) or "-",
        "passes": "{passes:.1f}",
    }
    return paragraphs(text, table_of([absent | row for row in record["rows"]], columns))


def more_data(record: Row) -> str:
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
    return paragraphs(text, table_of(record["rows"], columns), picture)


def real_convnet(record: Row) -> str:
    """Return a table with a row for each method and a column for each share of the MACs."""
    rows, cost = record["rows"], "CPU s"
    largest = max(row["share"] for row in rows)
    text = (
        f"A convolutional network, {record['model']}, with ImageNet weights, calibrated on {record['crops']} crops and "
        f"judged on {record['held_out']} crops of other photographs. Relative error of the logits and agreement of the "
        f"top class with the dense model, by the share of the MACs; CPU seconds of `reduce` at {largest:g} on "
        f"{record['cpu']}, {record['threads']} thread(s):"
    )
    form = "{share:g} of the MACs"
    cells = [{**row, "head": form.format(**row), "cell": "{error:.3f}, {agreement:.1%}".format(**row)} for row in rows]
    cells += [{**row, "head": cost, "cell": f"{row['cpu_s']:.0f}"} for row in rows if row["share"] == largest]
    order = [*_shares(rows, form), cost]
    return paragraphs(text, cross_table(cells, {"method": "{method}"}, "{head}", "{cell}", order))
