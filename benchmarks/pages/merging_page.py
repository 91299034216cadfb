"""Tables of merged tokens: their positions, and merging for MLPs alone."""

from benchmarks.pages.markdown import Column, Row, cross_table, interval_of, paragraphs, table_of

_MODELS = {"vit_small_patch16_rope_224": "rotary ViT", "eva02_tiny_patch14_224": "EVA-02"}


def positions(record: Row) -> str:
    """Return errors by model, way and number of merged tokens, then graphs of models of real size."""
    merged = [row for row in record["rows"] if row["way"] != "dense"]
    shares: dict[int, float] = {}
    for row in merged:
        shares.setdefault(row["merged"], row["macs_share"])
    dense = {row["model"]: row["accuracy"] for row in record["rows"] if row["way"] == "dense"}
    accuracies = ", ".join(f"{_MODELS[model]} {dense[model]:.1%}" for model in _MODELS)
    quality = (
        "Two small models trained on the digits (64 patches, 6 blocks), one with rotary positions alone, one with "
        f"learned ones too (accuracy: {accuracies}). Relative error of the logits on 500 held-out digits, by the "
        "number of tokens that each block merges. A merged token is turned by the mean sine and cosine of its source "
        "tokens, scaled to the root of their length (as `--merge-tokens` does), as they are, or scaled to length one, "
        "or by the sources' mean angle. `closed loop` repairs the first at full widths with "
        f"{record['calibration_images']} calibration images. `widths` has the same multiply-adds with all tokens "
        "(`best`, by site, closed loop): on these redundant models narrower layers lose next to nothing, other than on "
        "photographs ([Real models](real-models.md))."
    )
    columns = {
        "model": "`{shape}`",
        "tokens": "{tokens} to {tokens_left}",
        "MACs": "{macs_share:.3f}",
        "of them for positions": "{positions_share:.1%}",
        "error of the ONNX graph": "{graph_error:.1e}",
        "images with other merges": "{images_apart} of 8",
        "fused attentions": "{fused_attention} of {attentions}",
    }
    real = (
        "Models of real size with **random weights**, four tokens in a hundred merged per block: they show costs, "
        "graphs and TensorRT-RTX plans, and nothing of quality. Errors are of the FP32 graph against torch on noise:"
    )
    first: dict[str, Column] = {"model": lambda row: _MODELS[row["model"]], "way": "{way}"}

    def head(row: Row) -> str:
        return f"{row['merged']} ({shares[row['merged']]:.2f} of the MACs)"

    errors = cross_table(merged, first, head, "{error:.3g}")
    return paragraphs(quality, errors, real, table_of(record.get("shapes", ()), columns))


def mlp_merging(record: Row) -> str:
    """Return errors by model and share of the tokens, beside widths of the same cost, then times of graphs."""
    rows = [{**row, "way": _way(row)} for row in record["rows"]]
    columns: dict[str, Column] = {
        "model": "{model}",
        "reduced by": "{way}",
        "MACs": "{macs_share:.2f}",
        "error": "{error:.3g}",
        "median input": "{median_error:.3g}",
    }
    quality = (
        "`--merge-how mlp` on DINOv2-S (error of the class token on held-out photographs) and on a small Swin trained "
        "on the digits (error of the logits on 500 held-out digits). Merged models have full widths and no repair; "
        "widths are reduced at quick effort:"
    )
    times = [
        {"model": row["timed"], "share": row["share"], "macs_share": row["macs_share"], **each}
        for row in record.get("times", ())
        for each in row["rows"]
    ]
    timed: dict[str, Column] = {
        "model": "`{model}`",
        "batch": "{batch}",
        "MACs": "{macs_share:.2f}",
        "speed-up": interval_of("speedup"),
    }
    speed = (
        "Time of FP32 graphs in ONNX Runtime on two CPU threads, 30 % of the tokens merged for each MLP, against dense "
        "(random weights):"
    )
    return paragraphs(quality, table_of(rows, columns), speed, table_of(times, timed))


def _way(row: Row) -> str:
    if row["way"] == "merged":
        return f"{row['share']:.0%} of each MLP's tokens merged"
    return str(row["way"]) if row["share"] == 0 else f"widths like {row['share']:.0%} merged"
