"""Write the README's tables from the recorded results, between the marker lines of each part.

python -m benchmarks.readme_tables            writes README.md
python -m benchmarks.readme_tables --check    fails when README.md is not what the records say
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import click

from benchmarks import (
    bf16_page,
    convnets_page,
    decision_page,
    decoder_onnx_page,
    decoder_page,
    engines_page,
    heads_page,
    openvino_page,
    pixels_page,
    polish_page,
    quantised_page,
    sparsity_page,
)
from benchmarks.coverage.page import coverage
from benchmarks.gpu import page as gpu_page
from benchmarks.markdown import table
from benchmarks.real import convnet_page
from benchmarks.real import page as real_page

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKS = {part: (f"<!-- {part}: begin -->", f"<!-- {part}: end -->") for part in ("support", "real encoder", "measured")}
METHODS = ("best, closed loop", "best", "corp", "corp-v1", "none")
MLP_METHODS = (
    "best",
    "corp",
    "corp-v1",
    "grail",
    "grail, symmetric closed loop",
    "grail-fold",
    "fold",
    "vbp",
    "none",
)
SPARSITIES = (0.3, 0.5, 0.7, 0.875)


def _interval(value: Sequence[float | None] | None) -> str:
    if value is None or value[0] is None:
        return "-"
    low, high = value[1], value[2]
    return f"{value[0]:.2f}" + ("" if low is None or high is None else f" ({low:.2f} to {high:.2f})")


def _errors(record: dict[str, Any], kind: str, methods: Sequence[str]) -> str:
    """One row a model and method that the record has: mean error and accuracy over the calibration seeds."""
    rows = []
    for model in record["models"]:
        for method in methods:
            key = model["name"], kind, method
            every = [row for row in record["rows"] if (row["model"], row["kind"], row["method"]) == key]
            if not every:
                continue
            cells = []
            for sparsity in SPARSITIES:
                found = [row for row in every if row["sparsity"] == sparsity]
                error, accuracy = (mean(row[key] for row in found) for key in ("relative_error", "accuracy"))
                cells.append(f"{error:.4f} ({accuracy:.1%})")
            rows.append([f"{model['name']} (dense {model['accuracy']:.1%})", method, *cells])
    return table(["model", "method", *(f"{sparsity:.1%}" for sparsity in SPARSITIES)], rows)


def methods(record: dict[str, Any]) -> str:
    """Relative logit error of joint reductions, and of the presets that are about MLPs on those alone."""
    text = "Relative logit error (and accuracy) on held-out images at equal widths, joint MLP and Q/K sparsity, "
    text += f"{record['calibration_images']} calibration images, mean of the calibration seeds:"
    parts = [
        text,
        _errors(record, "joint", METHODS),
        "The same of MLPs alone, with the presets that reduce nothing else:",
    ]
    parts.append(_errors(record, "mlp", MLP_METHODS))
    return "\n\n".join([*parts, *record.get("remarks", [])])


def hard_vit(record: dict[str, Any]) -> str:
    """A model trained so that nothing is to spare: error, accuracy and its change by each method."""
    sparsities = sorted({row["sparsity"] for row in record["rows"]})
    cells: dict[str, dict[float, list[str]]] = {}
    for row in record["rows"]:
        change, low, high = row["points"]
        error = f"{row['relative_error']:.3f} ({row['accuracy']:.1%})"
        shown = [f"{row['macs_share']:.2f}", error, f"{change:+.1f} ({low:+.1f} to {high:+.1f})"]
        cells.setdefault(row["method"], {})[row["sparsity"]] = shown
    blank = ["-"] * 3
    lines = [[method, *(cell for each in sparsities for cell in of.get(each, blank))] for method, of in cells.items()]
    head = [name for each in sparsities for name in (f"MACs at {each:.0%}", "error (accuracy)", "points (95 %)")]
    low, high = record["dense_accuracy_interval"]
    text = (
        f"A ViT trained to be hard to prune ({record['model']['depth']} blocks, {record['model']['embed_dim']} wide; "
        "hidden channels, queries and keys held equally strong and uncorrelated in training) on "
        f"{record['classes']} classes of the procedural images, dense {record['dense_accuracy']:.1%} ({low:.1%} to "
        f"{high:.1%}) of {record['held_out_images']:,} held-out images. Reduced from {record['calibration_images']} "
        "images, labels never used but to judge; `by site` and `thorough` keep the MACs of uniform widths. Relative "
        "logit error, accuracy and its change in points with a paired interval:"
    )
    return "\n\n".join([text, table(["method", *head], lines), *record.get("remarks", [])])


def text_encoder(record: dict[str, Any]) -> str:
    """A model with little redundancy: errors as shares of preset corp's, mean over the seeds."""
    found: dict[tuple[str, float, int], dict[str, list[dict[str, Any]]]] = {}
    for row in record["rows"]:
        case = row["kind"], row["sparsity"], row["calibration_tokens"]
        found.setdefault(case, {}).setdefault(row["method"], []).append(row)
    names = list(dict.fromkeys(row["method"] for row in record["rows"] if row["method"] != "corp"))
    lines = []
    for (kind, sparsity, tokens), by_method in found.items():
        cells = [
            f"{mean(row['of_corp'] for row in by_method[name]):.3f}" if name in by_method else "-" for name in names
        ]
        corp = f"{mean(row['error'] for row in by_method['corp']):.3f}"
        lines.append([kind, f"{sparsity:.0%}", f"{tokens:,}", corp, *cells])
    text = (
        "A pretrained 6-layer text encoder, where little is redundant: relative error of the pooled output on held-out "
    )
    text += "text by preset corp, and the others' as shares of it (uniform widths but by site; means of the seeds):"
    whole = table(["removed from", "share", "calibration tokens", "corp", *names], lines)
    return "\n\n".join([text, whole, *record.get("remarks", [])])


def engines(record: dict[str, Any]) -> str:
    """Fused attention, kernels and plan sizes."""
    rows = [
        [
            row["model"],
            row["variant"],
            f"{row['macs'] / 1e9:.2f}",
            f"{row['fused_attention']} of {row['blocks']}",
            str(row["kernels"]),
            f"{row['plan_bytes'] / 1e6:.1f}",
        ]
        for row in record["rows"]
    ]
    text = "TensorRT-RTX engines built without a GPU, FP16, SM86, 50 % joint sparsity; plans are the same bytes twice:"
    return text + "\n\n" + table(["model", "heads", "GMAC", "fused attention", "kernels", "plan MB"], rows)


def cpu_latency(record: dict[str, Any]) -> str:
    """ONNX Runtime on the CPU, dense against reduced."""
    rows = []
    for each in record["rows"]:
        for line in each["rows"]:
            p50 = [line["p50_ms"][name] for name in ("dense", "reduced")]
            shown = ["-" if value is None else f"{value[0]:.1f}" for value in p50]
            realised = "-" if line["realised_share"] is None else f"{line['realised_share']:.0%}"
            head = [each["model"], each["heads"], f"{each['macs_share']:.2f}", str(line["batch"])]
            rows.append([*head, *shown, _interval(line["speedup"]), _interval(line["noise"]), realised])
    names = ["model", "heads", "MACs", "batch", "dense p50 ms", "reduced p50 ms", "speed-up", "A/A noise", "realised"]
    return "ONNX Runtime on 2 CPU cores, FP32, random weights, interleaved in one process:\n\n" + table(names, rows)


def calibration(record: dict[str, Any]) -> str:
    """What one calibration costs, beside the processor it was measured on; nothing of records that don't name it."""
    options, passes = record["options"], record["speed"]["ratio_wall"]
    cpu, threads = record["environment"].get("cpu"), record["environment"]["threads"]
    if cpu is None:
        return ""
    images = int(options["batches"]) * int(options["batch_size"])
    text = f"Calibrating {options['model']} on {images} images, batch {options['batch_size']}, {threads} threads of an "
    text += f"{cpu}, from opening to the moments: {passes['calibrate']:.2f} times the faster of a bare forward pass in "
    text += "whole batches and one in pieces"
    system = passes.get("calibrate_with_system")
    return text + (f"; {system:.2f} with CORP's per-image system." if system else ".")


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


def reduction(record: dict[str, Any]) -> str:
    """What a whole uniform reduction takes in seconds: elimination, exchanges, recovery, checks and writing."""
    cpu, wall = (statistics.median(record["samples"]["uniform"][clock]) for clock in ("cpu_s", "wall_s"))
    return (
        f"Reducing {record['model']} from its moments by preset best, {record['sparsity']:.0%} of every width, all of "
        f"it (elimination, exchanges, recovery, writing): {wall:.0f} seconds, {cpu:.0f} of CPU time, "
        f"{record['threads']} threads, {record['cpu']}."
    )


def proof_cost(record: dict[str, Any]) -> str:
    """What a proof costs beside the passes that it can't do without."""
    verify = record["verify"]
    return (
        f"Verifying {record['model']}, its half and the half's FP32 and FP16 graphs on {record['images']} images at "
        f"batches {', '.join(map(str, record['batches']))}, {record['threads']} threads, {record['cpu']}: "
        f"{verify['cpu_s']:.0f} CPU seconds, {record['ratio']:.2f} times the passes over the images that it can't do "
        f"without (each of the four, and the dense model in FP16), and {verify['peak_mb'] / 1e3:.1f} GB."
    )


def budgets(record: dict[str, Any]) -> str:
    """What the same share of the MACs loses by the curves of before and of now."""
    text = (
        "Relative output error on held-out inputs of widths that a budget of MACs chose, in one pass: by one look at "
        "each site at half its widths (`before`), by squared gradients on inputs set apart, values beside queries and "
        "keys (`now`), and the better of that and a second allocation on the probe's inputs (`taken`):"
    )
    ways = ("before", "now", "taken")
    rows = [[row["model"], f"{row['share']:g}", *(f"{row[way]:.4f}" for way in ways)] for row in record["rows"]]
    return text + "\n\n" + table(["model", "share of the MACs", *ways], rows)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "methods.json": methods,
    "convnets.json": convnets_page.convnets,
    "hard_vit.json": hard_vit,
    "budgets.json": budgets,
    "polish.json": polish_page.polish,
    "layer_polish.json": polish_page.layer_polish,
    "rotation.json": heads_page.rotation,
    "whole_heads.json": heads_page.whole_heads,
    "text_encoder.json": text_encoder,
    "trained_decoder.json": decoder_page.trained_decoder,
    "sequential_decoder.json": decoder_page.sequential_decoder,
    "sparsity.json": sparsity_page.sparsity,
    "sparse_engines.json": sparsity_page.sparse_engines,
    "break_fusion.json": engines_page.break_fusion,
    "engines.json": engines,
    "bf16.json": bf16_page.bf16,
    "quantised.json": quantised_page.quantised,
    "pixels.json": pixels_page.pixels,
    "cpu_latency.json": cpu_latency,
    "openvino.json": openvino_page.openvino,
    "decoder_onnx.json": decoder_onnx_page.decoder_onnx,
    "calibration_small.json": calibration,
    "calibration_base.json": calibration,
    "passes.json": passes,
    "reduce_base.json": reduction,
    "proof_cost.json": proof_cost,
    "sweep_trials.json": decision_page.sweep_trials,
    "history.json": decision_page.history,
    "reproduce_digits.json": decision_page.reproduced,
    "reproduce_procedural.json": decision_page.reproduced,
}


# What stands first: real weights and real photographs.
REAL: dict[str, Callable[[dict[str, Any]], str]] = {
    "real_vit.json": real_page.real_vit,
    "real_vit_engines.json": real_page.real_vit_engines,
    "dense_features.json": real_page.dense_features,
    "real_convnet.json": convnet_page.real_convnet,
}


SUPPORT: dict[str, Callable[[dict[str, Any]], str]] = {"coverage.json": coverage}


def on_gpus(results: Path) -> list[str]:
    """Goals and tables of the records that were measured on a GPU; nothing where there are none."""
    read = {part: results / f"gpu_{part}.json" for part in gpu_page.PARTS}
    found = {part: json.loads(path.read_text(encoding="utf-8")) for part, path in read.items() if path.is_file()}
    records = {part: record for part, record in found.items() if gpu_page.counts(record)}
    tables = [
        gpu_page.latency(record, 0.5) if part == "latency" else gpu_page.TABLES[part](record)
        for part, record in records.items()
    ]
    return ["Goals on a GPU:\n\n" + gpu_page.goals(records), *tables] if records else []


def _tables(tables: Mapping[str, Callable[[dict[str, Any]], str]], results: Path) -> list[str]:
    """Those whose record is there and says something."""
    parts = []
    for name, page in tables.items():
        path = results / name
        if path.is_file():
            parts.append(page(json.loads(path.read_text(encoding="utf-8"))))
    return [part for part in parts if part]


def measured(results: Path = RESULTS) -> str:
    """All tables whose record is there, beside those of the real encoder."""
    return "\n\n".join(_tables(TABLES, results) + on_gpus(results))


def real_encoder(results: Path = RESULTS) -> str:
    """The tables of real weights and real photographs."""
    return "\n\n".join(_tables(REAL, results))


def support(results: Path = RESULTS) -> str:
    """What goes through the whole chain."""
    return "\n\n".join(_tables(SUPPORT, results))


def readme_with_tables(text: str) -> str:
    """The README with what stands between the markers made anew."""
    for part, content in (("support", support()), ("real encoder", real_encoder()), ("measured", measured())):
        begin, end = MARKS[part]
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n\n{content}\n\n{end}{after}"
    return text


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; fail when the README differs.")
def main(check: bool) -> None:
    """Bring the README's tables up to the records."""
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    made = readme_with_tables(text)
    if check and made != text:
        raise click.ClickException("README.md differs from the records; run python -m benchmarks.readme_tables")
    if not check:
        path.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
