"""Exported graphs, and records and audits of engines, on the terminal."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from rich.table import Table

from export.engine.audit import Audit
from export.engine.record import CompatibilityPrice, EngineRecord
from ground.ports import FUSION_BREAK
from ground.precision import PRECISIONS, QUANTISED


def engine_table(record: EngineRecord) -> Table:
    table = Table("", "")
    sites, fused = len(record.attention_sites), record.fused_attention
    small = sum(record.weight_types.get(each.name, 0.0) for each in QUANTISED.values())
    share, bits = (small, 8) if small else (record.half_weight_share, 16)
    rows = {
        "backend": f"{record.backend} {record.library_version}",
        "precision": f"{record.precision} ({share:.0%} of the weights in {bits} bits)",
        "targets": ", ".join(record.targets) or "-",
        "profiles": ", ".join(record.profiles) or "-",
        "kernels": _or_unknown(record.kernels),
        "fused attention": f"{_or_unknown(fused)} of {sites}" if sites or fused is None else "the graph has none",
        "plan": f"{record.plan_bytes / 1e6:.2f} MB, built in {record.build_seconds:.1f} s",
        "device memory": _memory(record),
    }
    if record.fusion_breaks:
        broken = ", ".join(port.name.removeprefix(FUSION_BREAK) for port in record.fusion_breaks)
        rows["fusion breaks"] = f"{len(record.fusion_breaks)} ({broken})"
    if record.compatibility is not None:
        rows |= _price(record.compatibility)
    sparse = record.options.get("sparse_share")
    if isinstance(sparse, float):
        rows["sparse"] = f"{sparse:.0%} of the matrices are 2:4, {_sparse_kernels(record)}"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _or_unknown(count: int | None) -> str:
    return "unknown" if count is None else str(count)


def _price(price: CompatibilityPrice) -> dict[str, str]:
    rows = {}
    for plan in price.plans:
        parts = [f"{100 * (price.own.plan_bytes / plan.plan_bytes - 1):+.1f} % bytes"]
        for name, own, other in (
            ("kernels", price.own.kernels, plan.kernels),
            ("fused attention", price.own.fused_attention, plan.fused_attention),
        ):
            parts.append(f"{name} unknown" if own is None or other is None else f"{own} {name} for {other}")
        memory = price.own.device_memory_bytes, plan.device_memory_bytes
        if memory[0] is not None and memory[1]:
            parts.append(f"{100 * (memory[0] / memory[1] - 1):+.1f} % memory")
        parts += [
            f"{100 * (each.ratio - 1):+.1f} % time at batch {each.batch}"
            for each in price.latencies
            if each.target == plan.target
        ]
        rows[f"{price.level} against {plan.target}"] = ", ".join(parts)
    return rows | ({"latency": price.reason} if price.reason else {})


def _memory(record: EngineRecord) -> str:
    memory = record.memory
    if memory.weights_bytes is None and memory.activations_bytes is None:
        return f"unknown ({memory.reason})"
    weights = "weights unknown" if memory.weights_bytes is None else f"weights {memory.weights_bytes / 1e6:.1f} MB"
    if memory.activations_bytes is None:
        return f"{weights}, activations unknown ({memory.reason})"
    pairs = zip(record.batches, memory.activations_bytes, strict=True)
    peaks = ", ".join(f"{size / 1e6:.1f} MB up to batch {batch.largest}" for batch, size in pairs)
    return f"{weights}, activations {peaks}"


def _sparse_kernels(record: EngineRecord) -> str:
    if record.sparse_layers is None:
        return "the builder doesn't say which kernels it took"
    eligible = "" if record.sparse_eligible is None else f" of {record.sparse_eligible} that it could run sparse"
    return f"sparse kernels for {record.sparse_layers} layers{eligible}"


def audit_table(audits: Sequence[Audit]) -> Table:
    heads = ("fused, dense", "reduced", "kernels, dense", "reduced", "plan MB, dense", "reduced")
    table = Table("target", *heads, "memory MB, dense", "reduced", "")
    for audit in audits:
        cells = chain.from_iterable(zip(_cells(audit.dense), _cells(audit.reduced), strict=True))
        table.add_row(f"{audit.dense.backend} {audit.target}", *cells, "kept" if audit.passed else "LOST")
    return table


def lost_lines(audits: Sequence[Audit]) -> list[str]:
    return [f"{each.target}: {', '.join(each.lost)} lost the fused attention kernel" for each in audits if each.lost]


def _cells(record: EngineRecord) -> tuple[str, str, str, str]:
    sites = len(record.attention_sites)
    fused = f"{record.fused_attention} of {sites}" if sites else "-"
    peak = max(record.device_memory_bytes.values(), default=None)
    memory = "-" if peak is None else f"{peak / 1e6:.1f}"
    return fused, str(record.kernels), f"{record.plan_bytes / 1e6:.2f}", memory


def graph_lines(rows: Sequence[Mapping[str, Any]], *, kept: Mapping[str, Sequence[str]]) -> list[str]:
    """Return lines on each graph, on uint8 inputs and fusion breaks, and on sites kept in FP32 by precision."""
    lines = []
    for row in rows:
        form = f"opset {row['opset']}" if "opset" in row else f"compiled for {row['compiled_for']}"
        lines.append(f"{row['path']}: {row['precision']}, {form}, {row['size_bytes'] / 1e6:.2f} MB")
    for row in rows:
        if place := row.get("normalised"):  # the path of a module, or "ahead of the model"
            lines.append(f"{row['path']}: takes uint8 pixels, normalised {place if ' ' in place else f'in {place}'}")
    for row in rows:
        if breaks := row.get("fusion_breaks"):
            lines.append(f"{row['path']}: fusion broken at {', '.join(breaks)}")
    for name, sites in kept.items():
        of_several = f" in {name}" if len(kept) > 1 else ""
        if sites:
            lines.append(f"kept in FP32{of_several}: {', '.join(sites)}")
        else:
            pure = PRECISIONS[name].pure
            lines.append(f"nothing had to be kept in FP32 on these images, so the graph is {pure}, not {name}")
    return lines
