"""Figures that pages of docs/ quote in running text are those of the records in benchmarks/results."""

import json
import math
import re
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import pytest

from tests.pages import DOCS, ROOT


def record(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def rows(name: str, **where: Any) -> list[dict[str, Any]]:
    found = [row for row in record(name)["rows"] if all(row[key] == value for key, value in where.items())]
    assert found, (name, where)
    return found


def mean(name: str, figure: str, **where: Any) -> float:
    """Over seeds, where a record has several."""
    return fmean(row[figure] for row in rows(name, **where))


def dinov2(method: str, share: float = 0.8) -> str:
    return f"{mean('real_vit', 'class_error', method=method, share=share):.3f}"


def hard(method: str, figure: str = "relative_error") -> float:
    return mean("hard_vit", figure, method=method, sparsity=0.5)


def half_of(model: str, method: str, kind: str = "joint") -> str:
    return f"{mean('methods', 'relative_error', model=model, method=method, kind=kind, sparsity=0.5):.4f}"


def convnet(method: str, share: float = 0.5) -> str:
    return f"{mean('real_convnet', 'error', method=method, share=share):.3f}"


def sparse(model: str, method: str) -> float:
    return mean("sparsity", "error", model=model, method=method)


def speedup(measured: list[dict[str, Any]], batch: int = 1, **where: Any) -> str:
    [one] = [each for each in measured if all(each[key] == value for key, value in where.items())]
    own = one.get("latency", one)["rows"]
    return f"{next(row['speedup'][0] for row in own if row['batch'] == batch):.2f} times"


def typed(model: str, precision: str) -> float:
    [one] = [each for each in record("bf16")["models"] if each["model"] == model]
    return float(next(row["relative_error"] for row in one["rows"] if row["precision"] == precision))


def quantised(precision: str) -> float:
    found = [
        row["error"]
        for row in record("quantised")["quality"]
        if (row["model"], row["precision"], row["way"]) == ("digits, dense", precision, "auto")
    ]
    return float(found[0])


def of_corp(method: str) -> str:
    where = {"kind": "joint", "sparsity": 0.5, "calibration_tokens": 39936, "method": method}
    return f"{mean('text_encoder', 'of_corp', **where):.3f}"


def of_measurement() -> Iterator[str]:
    tallies = record("gate_alarms")["tallies"]
    for row in tallies.values():
        held = (f"{row[key]} of {row['intervals']}" for key in ("hold_one", "bootstrap_hold_one"))
        fails = (row["verdicts"][key].get("FAIL", 0) for key in ("equal", "slower by 5 %"))
        yield f"| {row['comparisons']} | {' | '.join((*held, *map(str, fails)))} | {row['naive_apart']} |"
    every = record("gate_alarms")["all"]
    bound = math.ceil(1e4 * every["false_alarms_below"]) / 100  # a bound is rounded up
    yield f"{every['false_alarms']} in {every['comparisons']:,} comparisons mean a rate below {bound:.2f} %"
    for key, words in (("hold_one", "{} to {} % of the comparisons"), ("bootstrap_hold_one", "does in {} to {} %")):
        shares = sorted(round(100 * row[key] / row["intervals"]) for row in tallies.values())
        yield words.format(shares[0], shares[-1])
    yield f"the interval is {tallies['quiet']['width_to_bootstrap']:.2f} times as wide"
    overhead = record("harness_overhead")
    yield f"{overhead['inside_us']:.2f} µs inside what it times and {overhead['around_us']:.1f} µs around it"


def of_exactness() -> Iterator[str]:
    few, many = (
        next(row for row in record("real_vit")["photographs"] if (row["method"], row["photographs"]) == ("best", count))
        for count in (5, 37)
    )
    yield f"{few['fitted_class_error']:.3f} on the crops they were fitted to and {few['class_error']:.3f} on other"
    yield f"{many['fitted_class_error']:.3f} and {many['class_error']:.3f} with 37"


def of_parity() -> Iterator[str]:
    fp16, bf16 = ([typed(model, word) for model in ("digits", "DINOv2-S/14")] for word in ("fp16", "bf16"))
    yield f"{fp16[0]:.4f} of the outputs on the digits ViT, {fp16[1]:.4f} on a DINOv2-S"
    yield f"in BF16 {bf16[0]:.3f} and {bf16[1]:.3f}"
    agreement = record("openvino")["agreement"]
    yield f"over {len(agreement)} architectures"
    for key in ("openvino_of_onnxruntime", "onnxruntime_of_torch"):
        yield f"{max(row[key] for row in agreement):.1e}"


def of_levers() -> Iterator[str]:
    passes = record("passes")["passes"]
    yield f"calibrate {passes['calibrate']:.1f}, reduce {passes['uniform']:.1f} (`passes`)"
    yield f"| {passes['macs']:.1f} passes | as the widths |"
    yield f"| {passes['loop']:.1f} passes with its reduction |"
    yield f"{float(half_of('digits', 'best')):.3f} on digits (`methods`)"
    best, grail = (mean("convnets", "relative_error", asked=0.5, way=way) for way in ("best", "grail"))
    yield f"{best:.3f} on digits, preset `grail` {grail:.3f}"
    yield f"{mean('real_convnet', 'cpu_s', method='best', share=0.8):.0f} CPU seconds at 0.8 of the MACs"
    yield f"{dinov2('best, by site')}, uniform widths {dinov2('best')}, DINOv2-S"
    yield f"{dinov2('merging, growing')} growing, {dinov2('merging')} even"
    yield f"{dinov2('merging, growing')}, with widths {dinov2('best, by site')}, with both together"
    yield f"both together {dinov2('merging and widths')}"
    yield f"({dinov2('dropping', 0.7)} at 0.7, merging growing {dinov2('merging, growing', 0.7)})"
    yield f"{dinov2('best')} to {dinov2('best, closed loop')}, DINOv2-S (`real_vit`)"
    yield f"{hard('best'):.3f} to {hard('best, closed loop'):.3f} on a ViT made hard to prune"
    yield f"({hard('best, by site'):.3f} to {hard('best, by site, closed loop'):.3f} on the hard ViT)"
    dense = record("hard_vit")["dense_accuracy"]
    uniform, by_site = (100 * (dense - hard(method, "accuracy")) for method in ("best", "best, by site"))
    yield f"{uniform:.1f} points of accuracy with uniform widths"
    yield f"and {by_site:.1f} points with the same MACs chosen by site"
    two, widths = sparse("digits", "2:4"), sparse("digits", "widths at the MACs of 2:4")
    yield f"{two:.4f} on digits, widths of like MACs {widths:.4f}"
    two, widths, loop = (
        sparse("MiniLM", each)
        for each in ("2:4", "widths at the MACs of 2:4", "widths at the MACs of 2:4, closed loop")
    )
    yield f"MiniLM {two:.3f} and {widths:.3f}, in a closed loop {loop:.3f}"
    masked, refitted = (sparse("digits", f"2:4, largest weights, {each}") for each in ("mask only", "refit"))
    yield f"{masked:.3f} for the largest weights without refit, {refitted:.4f} refitted"
    yield f"{convnet('best')} to {convnet('best, closed loop')} (`real_convnet`)"
    yield f"MACs {convnet('grail')} to {convnet('grail, REPAIR')}"
    yield f"has {of_corp('best, closed loop')} of CORP's error with it, {of_corp('best')} without"
    yield f"{typed('digits', 'fp16'):.4f} digits, {typed('DINOv2-S/14', 'fp16'):.4f} DINOv2-S"
    yield f"{typed('digits', 'bf16'):.3f} and {typed('DINOv2-S/14', 'bf16'):.3f} (`bf16`)"
    yield f"{typed('DINOv2-S/14', 'mixed'):.4f} DINOv2-S, two blocks in FP32"
    yield f"{quantised('int8'):.3f} on digits (`quantised`)"
    yield f"{quantised('fp8'):.3f} on digits (`quantised`)"


def of_speed() -> Iterator[str]:
    for row in rows("engines", model="DeiT-S"):
        fused = f"{row['fused_attention']} of {row['blocks']}"
        gmac, megabytes = row["macs"] / 1e9, row["plan_bytes"] / 1e6
        yield f"| {row['variant']} | {gmac:.2f} | {fused} | {row['kernels']} | {megabytes:.1f} |"
    cpu, plans = record("cpu_latency")["rows"], record("real_vit_engines")
    yield f"at 0.62 of the MACs is {speedup(cpu, model='DeiT-S', heads='padded')}"
    yield f"square at 0.51 {speedup(cpu, model='DeiT-S', heads='square')}"
    yield f"ResNet-50 at 0.49 {speedup(record('convnets')['latency'], model='ResNet-50')}"
    inside = record("openvino")["latency"]
    yield f"the square one is {speedup(inside, runtime='openvino', arithmetic='fp32')}"
    yield f"widths at 0.8 are {speedup(plans['rows'], name='widths at 0.8')}"
    yield f"merging at 0.8 {speedup(plans['rows'], name='merging at 0.8')}"
    [merging] = [row["engine"] for row in plans["rows"] if row["name"] == "merging at 0.8"]
    dense = plans["dense_engine"]
    yield f"{dense['kernels']} kernels into {merging['kernels']}"
    yield f"{merging['plan_bytes'] / 1e6:.0f} MB instead of {dense['plan_bytes'] / 1e6:.0f}"
    own = record("quantised")
    plain, both = (speedup(own["cpu"], model=model, precision="int8") for model in ("dense", "reduced"))
    half = speedup(own["cpu"], model="reduced", precision="fp32")
    yield f"is {plain} as fast in INT8 as dense FP32, at half its widths {half}, with both {both}"
    kernels = {(row["model"], row["precision"]): row["kernels"] for row in own["plans"]}
    yield f"{kernels['dense', 'int8']} kernels in INT8 for {kernels['dense', 'fp16']} in FP16 when dense"
    yield f"{kernels['reduced', 'int8']} when reduced"


def of_papers() -> Iterator[str]:
    methods = ("none", "corp-v1", "corp", "best", "best, closed loop")
    yield f"| digits | {' | '.join(half_of('digits', each) for each in methods)} |"
    made = [half_of("procedural", each) for each in methods if each != "corp-v1"]
    yield f"| procedural images | {made[0]} | - | {' | '.join(made[1:])} |"
    yield ", ".join(f"{each} {dinov2(each)}" for each in ("none", "corp-v1", "corp", "best"))
    best, grail = (mean("convnets", "relative_error", asked=0.5, way=way) for way in ("best", "grail"))
    yield f"{best:.3f} instead of {grail:.3f} (`convnets.json`)"
    yield f"{half_of('digits', 'fold', 'mlp')} instead of {half_of('digits', 'grail-fold', 'mlp')} on digits"
    cast, refitted = (sparse("digits", f"2:4, CAST's cost, {each}") for each in ("mask only", "refit"))
    yield f"errs by {cast:.3f}, refitted {refitted:.4f}, the default {sparse('digits', '2:4'):.4f}"


QUOTED = {
    "concepts/measurement.md": (of_measurement,),
    "concepts/exact-and-approximate.md": (of_exactness,),
    "concepts/parity.md": (of_parity,),
    "concepts/precision-and-levers.md": (of_levers, of_speed),
    "papers.md": (of_papers,),
}


@pytest.mark.parametrize("page", QUOTED)
def test_pages_quote_their_records(page: str) -> None:
    text = re.sub(r"\s+", " ", (DOCS / page).read_text(encoding="utf-8"))
    missing = [said for quoted in QUOTED[page] for said in quoted() if said not in text]
    assert not missing, f"{page} says otherwise than its records: {missing}"
