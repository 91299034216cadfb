"""The tables of a record of real_vit.py, real_vit_engines.py and dense_features.py."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.pages.markdown import interval, table

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
    """The class token's error, a method a line."""
    shares = sorted({row["share"] for row in rows}, reverse=True)
    errors = {(row["method"], row["share"]): f"{row['class_error']:.3f}" for row in rows}
    methods = dict.fromkeys(row["method"] for row in rows)
    lines = [[method, *(errors.get((method, share), "-") for share in shares)] for method in methods]
    return table(["share of the MACs", *(f"{share:g}" for share in shares)], lines)


def _figures(rows: Sequence[Row]) -> str:
    """Every figure of the rows at one share."""
    lines = [
        [row["method"], *("-" if row[name] is None else words(row[name]) for name, (_, words) in FIGURES.items())]
        for row in rows
        if row["share"] == SHOWN_SHARE
    ]
    return table([f"at {SHOWN_SHARE:g} of the MACs", *(name for name, _ in FIGURES.values())], lines)


def _photographs(rows: Sequence[Row]) -> str:
    """What fewer photographs do: the error on the crops that a method was fitted to, and on the held-out ones."""
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
    """What all methods do to real weights."""
    calibration, held_out = record["calibration"], record["held_out"]
    rows = record["rows"]
    text = (
        f"**A real {record['model']}** (`make real`), fitted to {calibration['crops']} crops of "
        f"{calibration['photographs']} photographs, judged on {held_out['crops']} crops of {held_out['photographs']} "
        "others: relative error of the class token, ‖reduced − dense‖ / ‖dense‖, by the share of the dense MACs that "
        "may stay. Presets take the least uniform sparsity that leaves at most that share, of MLPs and Q/K alike; `by "
        "site` is `--macs`:"
    )
    parts = [text, _by_share(rows)]
    if any(row["share"] == SHOWN_SHARE for row in rows):
        more = (
            "All figures: errors of class and patch tokens, cosine of patch tokens (mean, and what 1 % fall below), "
            "error and overlap of the untouched saliency head's maps, images whose nearest neighbour stays, CPU "
            f"seconds of `reduce` with {_threads(record)}, and the same in bare forward passes over the "
            "calibration crops:"
        )
        parts += [more, _figures(rows)]
    if record.get("photographs"):
        (share,) = {row["share"] for row in record["photographs"]}
        parts.append(
            f"Over-fitting: the class token's error at {share:g} of the MACs, uniform widths, on the very crops that "
            "were fitted to / on the held-out ones, by the number of photographs:"
        )
        parts.append(_photographs(record["photographs"]))
    return "\n\n".join([*parts, *record.get("remarks", [])])


def real_vit_engines(record: Mapping[str, Any]) -> str:
    """What engines make of it."""
    lines = []
    engines = [("dense", record["dense_engine"]), *((row["name"], row["engine"]) for row in record["rows"])]
    for row in record["rows"]:
        head = [row["name"], f"{row['macs_share']:.2f}", f"{row['class_error']:.3f}"]
        for line in row["latency"]["rows"]:
            p50 = [interval(line["p50_ms"][side], 1) for side in ("dense", "reduced")]
            rates = [interval(line["images_per_s"][side], 1) for side in ("dense", "reduced")]
            lines.append([*head, str(line["batch"]), *p50, *rates, interval(line["speedup"], 2)])
    text = (
        f"What engines make of it: ONNX Runtime, FP32, {_threads(record)} of an {record['cpu']}, each model "
        "interleaved with the dense one in one process (95 % intervals in brackets):"
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


def _link(links: Sequence[Mapping[str, Any]], kind: str, output: str) -> Mapping[str, Any]:
    return next(link for link in links if (link["kind"], link["output"]) == (kind, output))


def dense_features(record: Mapping[str, Any]) -> str:
    """What dense heads make of a reduced backbone's tokens, by the parity records of `verify --head`."""
    calibration, held_out = record["calibration"], record["held_out"]
    names = ["method", "MACs", "patch tokens", "cosine", "lowest 1 %", "neighbours", "CKA", "map error, worst", "IoU",
             "pixels", "FP16 map error", "FP16 IoU", "accuracy", "same class", "mIoU"]  # fmt: skip
    lines = []
    for row in record["rows"]:
        tokens = _link(row["links"], "reduced", "patches")
        maps, fp16 = (_link(row["links"], kind, "saliency") for kind in ("reduced", "whole"))
        textures = _link(row["links_of_mosaics"], "reduced", "textures")
        lines.append(
            [
                row["method"],
                f"{row['macs_share']:.2f}",
                f"{tokens['relative_error']:.3f}",
                f"{tokens['token_cosine_mean']:.3f}",
                f"{tokens['token_cosine_q01']:.3f}",
                f"{tokens['neighbour_agreement']:.0%}",
                f"{tokens['linear_cka']:.3f}",
                f"{maps['relative_error']:.3f}, {maps['relative_error_worst']:.2f}",
                f"{maps['iou']:.3f}",
                f"{maps['pixel_agreement']:.1%}",
                f"{fp16['relative_error']:.3f}",
                f"{fp16['iou']:.3f}",
                f"{row['linear']['accuracy']:.1%}",
                f"{textures['pixel_agreement']:.1%}",
                f"{textures['iou']:.3f}",
            ]
        )
    accuracy = record["rows"][0]["linear"]["dense_accuracy"]
    text = (
        f"CORP's experiment with a backbone whose dense heads stay as they are, on the same {record['model']} with "
        f"class and patch tokens as named outputs (`--outputs class,patches`), fitted to {calibration['crops']} crops "
        f"of {calibration['photographs']} photographs, judged on {held_out['crops']} crops of "
        f"{held_out['photographs']} others, all figures by `verify --head`: error, cosine, nearest neighbours and "
        "linear CKA (debiased) of patch tokens; error (all crops, worst crop) and overlap of the maps of its own "
        "saliency head, exported apart, and pixels on which they agree, of the reduced backbone in torch and as an "
        "FP16 graph; and a linear head that was trained on the dense model's tokens of "
        f"{record['mosaics']} mosaics of textures, on as many others (dense: {accuracy:.1%} of patches right): its "
        "accuracy, and how many patches keep their class:"
    )
    return "\n\n".join([text, table(names, lines), *record.get("remarks", [])])


def tried(record: Mapping[str, Any]) -> str:
    """What was tried before anything was built, and what it would bring."""

    def both(row: Row, what: str) -> str:
        return f"{row[f'fitted_{what}_error']:.3f} / {row[f'held_out_{what}_error']:.3f}"

    halves = [[row["way"], both(row, "class"), both(row, "patch")] for row in record["halves"]]
    ranks = sorted({row["rank"] for row in record["beside"]})
    lost = {(row["block"], row["width"], row["rank"]): row for row in record["beside"]}
    places = dict.fromkeys((row["block"], row["width"]) for row in record["beside"])
    beside = [
        [
            f"block {block}, as cheap as {width} channels",
            *(f"{(row := lost[block, width, rank])['fitted']:.3f} / {row['held_out']:.3f}" for rank in ranks),
        ]
        for block, width in places
    ]
    merges = [
        [
            f"{row['share']:g}: {row['way']}",
            *(f"{row[f'{what}_{how}']:.3f}" for what in ("class", "patch") for how in ("error", "median")),
        ]
        for row in record.get("merging", ())
    ]
    merging = [
        "Tokens merged in other ways, as many in the same places, nothing repaired: errors on held-out crops, of all "
        "and of the median crop, at 0.78, 0.7 and 0.6 of the MACs. The class token's attention is built "
        "(`--merge-metric attended`); gradients' energy, which needs numbers of its own for each block, and patches "
        "given back apart, which takes one more stream through all cuts, are not:",
        table(["tokens", "class token", "median", "patch tokens", "median"], merges),
    ]
    streams = [[str(row["keep"]), both(row, "class"), both(row, "patch")] for row in record["streams"]]
    polished = [
        [
            row["way"],
            str(row["steps"]),
            f"{row['judged']:.3f}" if "judged" in row else "-",
            *(f"{row[f'held_out_{what}_error']:.4f}" for what in ("class", "patch")),
        ]
        for row in record.get("polishes", ())
    ]
    polishes = [
        "The encoder that `--effort standard` makes at 0.8 of the MACs, polished by gradients on views of the same "
        "crops and stopped by photographs that no step is fitted to, though the loop before was: what is judged "
        "there, and errors on crops of other photographs. All matrices are what `--polish model` changes:",
        table(["polished", "steps", "judged by", "class token", "patch tokens"], polished),
    ]
    return "\n\n".join(
        [
            "Half of every MLP's channels taken from the DINOv2 encoder above, all else dense, chosen and repaired in "
            "other ways: errors on crops of the fit / on held-out ones. The outputs' metric is what budgets choose by; "
            "no ridge closes the gap between the two:",
            table(["half of the MLPs", "class token", "patch tokens"], halves),
            "A linear map beside the channels that stay, as many channels fewer as its rank: the share of the MLP's "
            "output lost. It gains little where half stays, and isn't built:",
            table(["", *(f"rank {rank}" for rank in ranks)], beside),
            "A narrower residual stream: all of it in so many of 384 principal directions, before any layer is "
            "repaired. Widths at the same MACs lose half as much, so it isn't built:",
            table(["directions", "class token", "patch tokens"], streams),
            *(merging if merges else ()),
            *(polishes if polished else ()),
            *record.get("remarks", []),
        ]
    )


def efforts(record: Mapping[str, Any]) -> str:
    """What each effort loses on inputs that nothing is fitted to, and what it costs; what ridges and types alone do."""

    def figures(row: Row) -> list[str]:
        return [f"{row[name]:.3f}" if name in row else "-" for name in ("error", "median_error", "fitted_error")]

    lines = []
    for row in record["rows"]:
        said = [f"{stage['name']} {stage['error']:.3f}" for stage in row["stages"]]
        if row["polish"] is not None:
            said.append(f"polish {row['polish']['error_before']:.3f} to {row['polish']['error']:.3f}")
        named = [row["model"], row["asked"], row["effort"]]
        lines.append([*named, *figures(row), ", ".join(said) or "-", f"{row['passes']:.1f}"])
    ridges = [
        [
            *(row[name] for name in ("model", "asked", "effort")),
            "halves" if row["ridge"] is None else f"{row['ridge']:g}",
            *figures(row)[:2],
            f"{row['passes']:.1f}",
        ]
        for row in record.get("ridges", ())
    ]
    precisions = [[row["model"], row["precision"], *figures(row)[:2]] for row in record.get("precisions", ())]
    names = ["model", "asked", "effort"]
    parts = [
        f"`reduce --effort` with preset `best`, fitted to {record['crops']} crops (MiniLM: 312 texts) and judged on "
        f"{record['held_out']} others: relative error of the outputs, of all and of the median one, and on the very "
        "inputs of the fit, the errors by which `standard` chose, on inputs that it set apart from its own, and CPU "
        "seconds in bare forward passes over what is fitted to:",
        table([*names, "error", "median", "on the fit's own", "stages", "passes"], lines),
        *record.get("remarks", []),
    ]
    if ridges:
        parts += [
            "Strengths of the ridge, said outright or chosen for each site by two halves of single inputs, of which "
            "one judges what is fitted to the other (`calibrate --groups image`):",
            table([*names, "ridge", "error", "median", "passes"], ridges),
            *record.get("remarks_on_ridges", []),
        ]
    if precisions:
        parts += [
            "For comparison, the dense models as graphs of fewer bits in ONNX Runtime without its fusions, judged on "
            "the same inputs (INT8: scales of every eighth input of the fit):",
            table(["model", "type", "error", "median"], precisions),
        ]
    return "\n\n".join(parts)
