"""The papers' tables of a given model, in the papers' layout.

FLOPs are multiply-accumulates in billions, as in the papers. A cell without a figure has the reason.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from corp_deploy.store.checkpoint import load_checkpoint
from corp_deploy.store.manifest import load_effort, path_beside
from ground.effort import Effort
from perf.record.runs import load_bench
from perf.stats.summary import summarise

from .papers import figure, printed
from .runs import Subject, Trials, calibrated, command, dense_of, swept

Cell = str | float | int
PAPERS = {"corp-v2": "CORP v2", "marchenko-pastur": "Marchenko-Pastur paper"}
CORP = ("--preset", "corp,best")
STEPS: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
RATIOS: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeTable:
    """A table of a model, with the printed table of the paper."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    printed: Mapping[str, Any] | None = None


def _made(
    key: str,
    paper: str,
    number: str,
    rows: Iterable[Sequence[Cell]],
    columns: Sequence[str] | None = None,
    note: str = "",
) -> MadeTable:
    """Return the table that corresponds to a printed one, by default with the printed columns."""
    of_paper = printed(paper, number)
    own = of_paper["columns"] if columns is None else columns
    title = f"{PAPERS[paper]}, {'Tables 5 and 10' if key == 'table10' else f'Table {number}'}"
    return MadeTable(
        key=key, title=title, columns=tuple(own), rows=tuple(map(tuple, rows)), note=note, printed=of_paper
    )


def _percent(value: float | None) -> Cell:
    return "-" if value is None else round(100 * value, 2)


def _down(now: float, dense: float) -> float:
    return round(100 * (1 - now / dense), 1)


def _cost(trial: Mapping[str, Any], dense: Mapping[str, Any]) -> tuple[Cell, ...]:
    """Return top-1 accuracy, FLOPs, their reduction in percent, and parameters."""
    less = _down(trial["macs"], dense["macs"])
    return _percent(trial["accuracy"]), round(trial["macs"] / 1e9, 4), less, round(trial["parameters"] / 1e6, 3)


def table_2(subject: Subject) -> MadeTable:
    """Return accuracy and cost with half of MLPs, of attention and of both removed."""
    found: dict[str, Trials] = {}
    for parts in ("mlp", "attn", "joint"):
        found[parts] = swept(subject, f"table2-{parts}", *CORP, "--sparsity", 0.5, "--parts", parts)
    dense = dense_of(subject, "table2-joint")
    base: tuple[Cell, ...] = (
        _percent(dense["accuracy"]), round(dense["macs"] / 1e9, 4), round(dense["parameters"] / 1e6, 3)
    )  # fmt: skip
    rows = [
        (f"{subject.name}, {by}", *base, *(cell for trials in found.values() for cell in _cost(trials[place], dense)))
        for place, by in enumerate(("corp", "best"))
    ]
    return _made("table2", "corp-v2", "2", rows)


def table_3(subject: Subject) -> MadeTable:
    """Return top-1 accuracy by the number of calibration images."""
    counts = subject.snapshots
    moments = [*(subject.moments_of(count) for count in counts), subject.moments]
    trials = swept(subject, "table3", *CORP, "--sparsity", 0.5, moments=moments)
    by_images: dict[int, dict[str, Cell]] = {}
    for trial in trials:
        by_images.setdefault(trial["images"], {})[trial["preset"]] = _percent(trial["accuracy"])
    rows = [(count, row["corp"], row["best"]) for count, row in sorted(by_images.items())]
    return _made("table3", "corp-v2", "3", rows, ("Calib", f"{subject.name}, corp", f"{subject.name}, best"))


def _efficiency(subject: Subject, trial: Mapping[str, Any] | None, dense: Mapping[str, Any], one: Any) -> list[Cell]:
    """Return latency (ms) at the first batch size, throughput (fps) at the last, and its ratio to the dense one."""
    if not one["speeds"]:
        return ["not timed", "not timed"] if trial is None else ["not timed", "not timed", "not timed"]
    first, last = one["speeds"][0], one["speeds"][-1]
    if trial is None:
        return [round(first["dense_p50_ms"]["value"], 3), round(last["dense_images_per_s"]["value"], 1)]
    speedup = last["speedup"]
    gain: Cell = "-" if speedup is None else round(speedup["value"], 2)
    return [round(first["p50_ms"]["value"], 3), round(last["images_per_s"]["value"], 1), gain]


def table_10(subject: Subject) -> MadeTable:
    """Return accuracy, size, latency and throughput by joint sparsity from 0 to 0.7."""
    steps = ",".join(map(str, STEPS))
    rows: list[tuple[Cell, ...]] = []
    for preset in ("corp", "best"):
        trials = swept(subject, f"table10-{preset}", "--preset", preset, "--sparsity", steps, timed=True)
        dense = dense_of(subject, f"table10-{preset}")
        base = (_percent(dense["accuracy"]), round(dense["parameters"] / 1e6, 3), round(dense["macs"] / 1e9, 4))
        name = f"{subject.name}, {preset}"
        rows.append((name, 0.0, *base, *_efficiency(subject, None, dense, trials[0]), 0.0, 0.0, 1.0))
        for trial in trials:
            latency, rate, gain = _efficiency(subject, trial, dense, trial)
            accuracy, flops, less, parameters = _cost(trial, dense)
            fewer = _down(trial["parameters"], dense["parameters"])
            rows.append((name, trial["mlp_sparsity"], accuracy, parameters, flops, latency, rate, fewer, less, gain))
    where = "nowhere" if subject.bench is None else f"in {subject.bench} on this machine's CPU"
    batches = f"latency at batch {subject.batches[0]}, throughput at batch {subject.batches[-1]}"
    note = f"Timed {where}: {batches}; widths are rounded to {subject.align}."
    return _made("table10", "corp-v2", "10", rows, note=note)


def table_6(subject: Subject) -> MadeTable:
    """Return seconds and peak memory of calibration, ranking and compensation, from the commands' records."""
    calibrated(subject)
    swept(subject, "table2-joint", *CORP, "--sparsity", 0.5, "--parts", "joint")  # has the size of the dense model
    size = round(dense_of(subject, "table2-joint")["parameters"] / 1e6, 3)
    rows: list[tuple[Cell, ...]] = []
    for preset in ("corp", "best"):
        output = subject.home / f"table6-{preset}"
        model = ("--model", *subject.model, "--moments", subject.moments, "--align", subject.align)
        command("reduce", *model, "--preset", preset, "--mlp", 0.5, "--attn", 0.5, "-o", output)
        parts = [_effort(subject.moments)["calibrate"], *(_effort(output)[name] for name in ("select", "recover"))]
        seconds = [part.seconds for part in parts]
        peaks: list[Cell] = ["-" if part.peak_bytes is None else round(part.peak_bytes / 1e6) for part in parts]
        taken = (round(seconds[0], 1), *(round(each, 2) for each in seconds[1:]), round(sum(seconds), 1))
        rows.append((f"{subject.name}, {preset}", size, *taken, *peaks))
    columns = (*printed("corp-v2", "6")["columns"], "Cal MB", "Rank MB", "Comp MB")
    note = (
        "Seconds on this machine's CPU, and the most that the process held meanwhile; calibration takes the "
        "per-image system too, which preset best needs not. Reading and writing files is not counted."
    )
    return _made("table6", "corp-v2", "6", rows, columns, note)


def _effort(output: Path) -> Mapping[str, Effort]:
    """Return seconds and memory by part of a command, from the record next to its output."""
    return load_effort(path_beside(output)).parts


def table_9(subject: Subject) -> MadeTable:
    """Return the redundancy of MLP activations."""
    found = command("inspect", "redundancy", "--moments", subject.moments)["sites"]
    rows = tuple(
        (
            each["site"], each["dim"], round(each["effective_rank"], 1), round(each["effective_rank"] / each["dim"], 3),
            each["k95"], round(each["k95_ratio"], 3), round(each["activation_sparsity"], 2),
        )
        for each in found
        if each["type"] == "mlp"
    )  # fmt: skip
    return _made("table9", "corp-v2", "9", rows)


def figure_2(subject: Subject) -> MadeTable:
    """Return top-1 accuracy by sparsity, with and without compensation."""
    words = ("--sparsity", ",".join(map(str, STEPS)))
    trials = swept(subject, "figure2", "--preset", "corp,best,none", *words)
    by = {(trial["preset"], trial["mlp_sparsity"]): _percent(trial["accuracy"]) for trial in trials}
    rows = tuple((step, *(by[preset, step] for preset in ("none", "corp", "best"))) for step in STEPS)
    columns = ("Sparsity", "without compensation", "CORP", "best")
    return MadeTable(key="figure2", title="CORP v2, Figure 2", columns=columns, rows=rows, note=figure("corp-v2", "2"))


def figure_5(subject: Subject) -> MadeTable:
    """Return accuracy by four rankings at 50 % joint sparsity, with and without compensation."""
    ranks = ("energy", "magnitude", "active", "combined")
    words = ("--preset", "corp", "--sparsity", 0.5, "--select", ",".join(ranks))
    with_it = swept(subject, "figure5-with", *words, "--repair", "affine", "--qk", "logit")
    without = swept(subject, "figure5-without", *words, "--repair", "none", "--qk", "select")
    bare, repaired = ({each["knobs"]["select"]: each["accuracy"] for each in trials} for trials in (without, with_it))
    rows = tuple((rank, _percent(bare[rank]), _percent(repaired[rank])) for rank in ranks)
    columns = ("Ranking", "without compensation", "with compensation")
    return MadeTable(key="figure5", title="CORP v2, Figure 5", columns=columns, rows=rows, note=figure("corp-v2", "5"))


def grail_2(subject: Subject) -> MadeTable:
    """Return accuracy by uniform ratios of MLPs: selectors and folding, with and without GRAIL."""
    ranks = ("wanda", "producer-l1", "producer-l2")
    words = ("--preset", "grail", "--parts", "mlp", "--sparsity", ",".join(map(str, RATIOS)))
    trials = swept(subject, "grail2", *words, "--select", ",".join(ranks), "--repair", "none,gram")
    folds = ("--preset", "grail-fold", "--parts", "mlp", "--calibration-images", subject.calibration)
    trials += swept(subject, "grail2-fold", *folds, "--sparsity", ",".join(map(str, RATIOS)))
    lines: dict[str, dict[float, Cell]] = {}
    for trial in trials:
        knobs = trial["knobs"]
        name = f"{knobs['select']}{' + GRAIL' * (knobs['repair'] == 'gram')}" if knobs else "folding + GRAIL"
        lines.setdefault(name, {})[trial["mlp_sparsity"]] = _percent(trial["accuracy"])
    rows = tuple((name, *(values[step] for step in RATIOS)) for name, values in lines.items())
    columns = ("Method", *(f"{step:.0%}" for step in RATIOS))
    note = f"{figure('grail', '2')}. Here of this model's MLPs."
    return MadeTable(key="grail2", title="GRAIL, Figure 2", columns=columns, rows=rows, note=note)


def deployability(subject: Subject) -> MadeTable:
    """Return a check of 2:4 sparsity on saved weights, and throughput at the best batch size."""
    sparse = subject.home / "sparse"
    model = ("--model", *subject.model, "--moments", subject.moments, "--images", subject.calibration)
    command("reduce", *model, "--sparse", "2:4", "-o", sparse)
    layers, groups = _exact_groups(sparse)
    rate: tuple[Cell, ...] = ("-", "not timed", "not timed", "not timed")
    if subject.bench is not None:
        trial = _sparse_speeds(subject)
        best = max(trial, key=lambda row: row[2])
        rate = (best[0], round(best[1], 1), round(best[2], 1), round(best[3], 3))
    status = f"exactly 2:4 in {groups:,} of {groups:,} groups of {layers} layers; this runtime has no sparse kernel"
    row: tuple[Cell, ...] = (subject.name, f"{subject.bench or 'none'}, FP32", *rate, status)
    note = "A native 2:4 endpoint needs TensorRT on an NVIDIA GPU (build --sparse); weights are not rewritten."
    return _made("deploy", "marchenko-pastur", "4", [row], note=note)


def _sparse_speeds(subject: Subject) -> list[tuple[int, float, float, float]]:
    """Return batch size, dense and sparse images per second, and speed-up of each batch size."""
    output = subject.home / "sparse-bench.json"
    dense = subject.home / "dense"
    command(
        "reduce", "--model", *subject.model, "--moments", subject.moments, "--mlp", 0, "-o", dense, "--preset", "none"
    )
    batches = ",".join(map(str, subject.batches))
    words = ("--batch", batches, "--time-limit", subject.time_limit, "-o", output)
    command("bench", dense, subject.home / "sparse", *words)
    speeds = []
    for row in summarise(load_bench(output)).rows:
        one, other = (row.sides[name].throughput for name in ("dense", "reduced"))
        if one is not None and other is not None and row.speedup is not None:
            speeds.append((row.batch, one.value, other.value, row.speedup.value))
    return speeds


def _exact_groups(sparse: Path) -> tuple[int, int]:
    """Count 2:4 layers and their groups of four. Raises ValueError if a group has more than two nonzero weights."""
    saved = load_checkpoint(sparse)
    weights, groups = saved.model.state_dict(), 0
    for name in saved.sparsity:
        nonzero = (weights[f"{name}.weight"].unflatten(1, (-1, 4)) != 0).sum(2)
        if int(nonzero.max()) > 2:
            raise ValueError(f"{sparse}: {name} has a group of {int(nonzero.max())} weights, expected 2 at most")
        groups += nonzero.numel()
    return len(saved.sparsity), groups


TABLES: Mapping[str, Callable[[Subject], MadeTable]] = MappingProxyType(
    {
        "2": table_2,
        "3": table_3,
        "10": table_10,
        "6": table_6,
        "9": table_9,
        "fig2": figure_2,
        "fig5": figure_5,
        "grail2": grail_2,
        "deploy": deployability,
    }
)
