"""What each page of docs/measured found, in one sentence out of its records: the first that stands between the markers.

Words that compare are asserted, so that a record that says otherwise is no sentence that is wrong.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from .startup_page import TORCH, WITH_TIMM, rows_by_command

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def _record(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _mean(name: str, figure: str, **where: Any) -> float:
    """Over the rows that are so: those of several seeds."""
    rows = [row for row in _record(name)["rows"] if all(row[key] == value for key, value in where.items())]
    assert rows, (name, where)
    return fmean(row[figure] for row in rows)


def _falling(*values: float) -> None:
    """What the sentence says: each loses less than the one before."""
    assert sorted(values, reverse=True) == list(values), values


def real_models() -> str:
    methods = ("none", "corp", "best", "best, by site", "merging, growing")
    errors = [_mean("real_vit", "class_error", method=each, share=0.8) for each in methods]
    _falling(*errors)
    none, corp, best, site, merged = (f"{error:.3f}" for error in errors)
    return (
        f"At 0.8 of DINOv2-S's multiply-adds the class token of photographs errs by {none} where nothing is repaired, "
        f"{corp} by preset `corp`, {best} by `best`, {site} with widths by site, and {merged} where tokens are merged "
        "in place of narrower layers."
    )


def methods() -> str:
    half: dict[str, Any] = {"model": "digits", "kind": "joint", "sparsity": 0.5}
    errors = [_mean("methods", "relative_error", method=each, **half) for each in ("none", "corp", "best")]
    _falling(*errors)
    hard = _record("hard_vit")["dense_accuracy"]
    lost = [
        100 * (hard - _mean("hard_vit", "accuracy", method=each, sparsity=0.5))
        for each in ("corp", "best", "best, by site")
    ]
    _falling(*lost)
    return (
        "Without half of everything the digits ViT errs by {:.4f} unrepaired, {:.4f} by `corp`, {:.4f} by `best`; the "
        "ViT with nothing to spare loses {:.1f} points of accuracy by `corp`, {:.1f} by `best`, and {:.1f} where the "
        "same multiply-adds are shared out by site."
    ).format(*errors, *lost)


def convnets() -> str:
    grail, best = (_mean("convnets", "relative_error", asked=0.5, way=way) for way in ("grail", "best"))
    _falling(grail, best)
    [resnet] = [each for each in _record("convnets")["latency"] if each["model"] == "ResNet-50"]
    speed = next(row["speedup"][0] for row in resnet["rows"] if row["batch"] == 1)
    return (
        f"Without half of its multiply-adds the digits' ResNet errs by {best:.3f} with preset `best` and by "
        f"{grail:.3f} with `grail`; a ResNet-50 at {resnet['macs_share']:.2f} of its multiply-adds is {speed:.2f} "
        "times as fast at batch 1."
    )


def sparsity() -> str:
    ways = ("2:4", "widths at the MACs of 2:4", "widths at the MACs of 2:4, closed loop")
    digits, mini = (
        [_mean("sparsity", "error", model=model, method=way) for way in ways] for model in ("digits", "MiniLM")
    )
    _falling(digits[0], digits[1])
    _falling(mini[1], mini[2], mini[0])
    return (
        f"At the same nominal multiply-adds narrower layers err by {digits[1]:.4f} and 2:4 by {digits[0]:.4f} on the "
        f"digits; on MiniLM it is {mini[1]:.3f} ({mini[2]:.3f} in a closed loop) and {mini[0]:.3f}."
    )


def engines() -> str:
    rows = {row["variant"]: row for row in _record("engines")["rows"] if row["model"] == "DeiT-S"}
    assert rows["padded"]["fused_attention"] == rows["square"]["fused_attention"] == rows["dense"]["blocks"]
    fused = {name: f"{row['fused_attention']} of {row['blocks']}" for name, row in rows.items()}
    kernels = {name: row["kernels"] for name, row in rows.items()}
    return (
        f"Of DeiT-S {fused['dense']} attentions are fused when it is dense ({kernels['dense']} kernels), and "
        f"{fused['padded']} at half of everything with padded ({kernels['padded']}) or square heads "
        f"({kernels['square']}); with ragged heads {fused['ragged']} are ({kernels['ragged']})."
    )


def precision() -> str:
    models = {each["model"]: each["rows"] for each in _record("bf16")["models"]}
    fp16, bf16 = (
        [
            next(row["relative_error"] for row in models[name] if row["precision"] == word)
            for name in ("digits", "DINOv2-S/14")
        ]
        for word in ("fp16", "bf16")
    )
    record = _record("quantised")
    int8, fp8 = (
        next(
            row["error"]
            for row in record["quality"]
            if (row["model"], row["precision"], row["way"]) == ("digits, dense", word, "auto")
        )
        for word in ("int8", "fp8")
    )
    fast = next(each for each in record["cpu"] if (each["model"], each["precision"]) == ("dense", "int8"))
    return (
        f"FP16 errs by {fp16[0]:.4f} on the digits ViT and {fp16[1]:.4f} on DINOv2-S, BF16 by {bf16[0]:.4f} and "
        f"{bf16[1]:.3f}; INT8 by {int8:.4f} and FP8 by {fp8:.3f} on the digits. On two CPU cores a dense DeiT-S is "
        f"{fast['rows'][0]['speedup'][0]:.2f} times as fast in INT8 at batch {fast['rows'][0]['batch']}."
    )


def latency() -> str:
    rows = _record("cpu_latency")["rows"]
    square = {each["model"]: [row["speedup"][0] for row in each["rows"]] for each in rows if each["heads"] == "square"}
    noise = [row["noise"][0] for each in rows for row in each["rows"]]
    said = ", ".join(f"{model} {min(fast):.2f} to {max(fast):.2f} times" for model, fast in square.items())
    return (
        f"Half of the multiply-adds, square heads: {said} as fast as dense, by batch. The dense model against itself "
        f"shows {min(noise):.2f} to {max(noise):.2f}."
    )


def decoders() -> str:
    ratio = {
        row["method"]: row["ratio"]["value"]
        for row in _record("trained_decoder")["rows"]
        if (row.get("part"), row.get("sparsity")) == ("MLP and groups", 0.5)
    }
    _falling(*(ratio[each] for each in ("none", "corp", "best", "best, closed loop")))
    both = next(row for row in _record("decoder_onnx")["rows"] if row["name"] == "both")
    prefill, step = max(both["prefill"], key=lambda row: row["length"]), both["decode"][0]
    return (
        "Without half of its channels and of its key/value groups a small trained Llama's perplexity is "
        f"{ratio['none']:.2f} times the dense one unrepaired, {ratio['corp']:.2f} by `corp`, {ratio['best']:.2f} by "
        f"`best`, {ratio['best, closed loop']:.2f} in a closed loop. A larger one is {prefill['speedup'][0]:.2f} times "
        f"as fast in a prefill of {prefill['length']} tokens and {step['speedup'][0]:.2f} times in decoding at batch "
        f"{step['batch']}."
    )


def costs() -> str:
    passes = _record("passes")["passes"]
    return (
        f"In forward passes over the calibration images: calibrating {passes['calibrate']:.1f}, reducing uniformly "
        f"{passes['uniform']:.1f}, with a budget of multiply-adds {passes['macs']:.1f}, in a closed loop "
        f"{passes['loop']:.1f}."
    )


def startup() -> str:
    rows = rows_by_command(_record("startup"), bytecode=True)
    torch_s = rows[TORCH]["cpu_s"]
    records = [rows[each]["cpu_s"] for each in ("gate", "report", "bench compare", "package lint", "check")]
    graphs = [rows[f"{each} of two graphs"]["cpu_s"] for each in ("bench", "verify")]
    assert max(*records, *graphs) < torch_s, (records, graphs, torch_s)
    inspect, doctor = (rows[each]["ratio"] for each in ("inspect", "doctor"))
    return (
        f"Commands on records take {min(records):.1f} to {max(records):.1f} CPU seconds, `bench` and `verify` of two "
        f"graphs {min(graphs):.1f} to {max(graphs):.1f}, less than `import torch` with {torch_s:.1f}; `doctor` takes "
        f"{doctor[TORCH]['cpu_s']:.2f} times `import torch`, `inspect` {inspect[WITH_TIMM]['cpu_s']:.2f} times "
        f"`import torch, timm`."
    )


def measurement() -> str:
    every, noise = _record("gate_alarms")["all"], _record("gate_noise")["five_percent_slower"]
    assert every["FAIL"] == 0, every
    return (
        f"In {every['comparisons']} comparisons of a model with itself on a loaded machine the gate never failed, and "
        f"a naive comparison raised {every['naive_alarms']} false alarms; a slowdown of "
        f"{100 * _record('gate_noise')['slowdown']:.1f} % was found in {noise['FAIL']} of {noise['repetitions']}."
    )


FINDINGS: Mapping[str, Callable[[], str]] = {
    "docs/measured/real-models.md": real_models,
    "docs/measured/methods.md": methods,
    "docs/measured/convnets.md": convnets,
    "docs/measured/sparsity.md": sparsity,
    "docs/measured/engines.md": engines,
    "docs/measured/precision.md": precision,
    "docs/measured/latency.md": latency,
    "docs/measured/decoders.md": decoders,
    "docs/measured/costs.md": costs,
    "docs/measured/startup.md": startup,
    "docs/measured/measurement.md": measurement,
}
