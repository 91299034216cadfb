"""Prices of hardware-compatible plans: their losses against plans built for one GPU each."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from corp_deploy.invocation.option import Invocation
from export.engine.build import Engine, build_engine, write_engine
from export.engine.options import BuildOptions
from export.engine.record import CompatibilityPrice, EngineRecord, PricedLatency
from export.engine.session import Library
from ground.gpu import missing_gpu
from perf.record.runs import Bench
from perf.stats.summary import summarise
from perf.timing.laps import Plan

from .speed import time_models

UNTIMED = "not measured: {}; the bench commands measure it where the GPU is"


def plan_beside(output: Path, target: str) -> Path:
    """Return the path of a target's own plan: `model.sm86.plan` for `model.plan`."""
    return output.with_name(f"{output.stem}.{target}{output.suffix}")


def build_priced(graph: Path, choices: BuildOptions, output: Path, *, library: Library | None = None) -> Engine:
    """Build and write the compatible plan and, beside it, a plan for each GPU alone; return the compatible engine.

    Its record has the price: sizes, kernels and, if this machine has one of the GPUs, latencies of both.
    """
    assert choices.compatibility is not None, choices
    built = build_engine(graph, choices, library=library)
    exact: dict[str, EngineRecord] = {}
    for target, options in choices.exact.items():
        alone = build_engine(graph, options, library=library)
        write_engine(alone, plan_beside(output, target))
        exact[target] = alone.record
    write_engine(built, output)
    latencies, reason = _timed(built.record, exact, output)
    price = CompatibilityPrice(
        level=choices.compatibility,
        own=built.record.priced(choices.compatibility),
        plans=tuple(record.priced(target) for target, record in exact.items()),
        latencies=tuple(latencies),
        reason=reason,
    )
    priced = replace(built, record=replace(built.record, compatibility=price))
    write_engine(priced, output)
    return priced


def bench_lines(record: EngineRecord, output: Path) -> tuple[str, ...]:
    """Return the commands that time the plans for one GPU against the compatible one."""
    assert record.compatibility is not None, record
    lines = []
    for plan in record.compatibility.plans:
        options = {"batch": (record.batches[0].tuned,), "output": str(output.with_suffix(f".{plan.target}.bench.json"))}
        arguments = (str(plan_beside(output, plan.target)), str(output))
        lines.append(str(Invocation(command="bench", arguments=arguments, options=options)))
    return tuple(lines)


def _timed(
    own: EngineRecord, exact: Mapping[str, EngineRecord], output: Path
) -> tuple[Sequence[PricedLatency], str | None]:
    missing = missing_gpu()
    if missing is not None:
        return (), UNTIMED.format(missing)
    target = next((name for name, record in exact.items() if _runs_here(record)), None)
    if target is None:
        return (), UNTIMED.format(f"this machine's GPU is none of {', '.join(exact)}")
    names = ("exact", "compatible")
    bench = time_models(plan_beside(output, target), output, batches=(own.batches[0].tuned,), plan=Plan(), names=names)
    return compare_latencies(bench, target), None


def _runs_here(record: EngineRecord) -> bool:
    """Return whether this machine's GPU is the target of a plan."""
    import torch

    if record.gpu is not None:
        return True  # full TensorRT builds for the GPU at hand
    major, minor = torch.cuda.get_device_capability()
    return record.targets == (f"{major}{minor}",)


def compare_latencies(bench: Bench, target: str) -> tuple[PricedLatency, ...]:
    """Return the ratio of the compatible plan's compute time to the exact one's, at batch sizes with an interval."""
    rows = [(row.batch, row.speedup) for row in summarise(bench).rows if row.measure == "compute"]
    return tuple(
        PricedLatency(target=target, batch=batch, ratio=1 / each.value, low=1 / each.high, high=1 / each.low)
        for batch, each in rows
        if each is not None and each.is_bounded and each.low > 0
    )
