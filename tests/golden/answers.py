"""Figures of golden files: make.py writes them beside the files, and tests/test_golden.py computes them again."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from calib.calibrate import STATE, ResumeFile
from calib.moments import Moments
from calib.store import load_moments
from corp_deploy.families.family import input_ports, output_ports
from corp_deploy.planning.sweep_trials import TrialFolder
from corp_deploy.polish.state import StateFile
from corp_deploy.proof.compare_engines import read_golden
from corp_deploy.proof.report_input import gather_report
from corp_deploy.release.card import _calibrated
from corp_deploy.release.check import check_release, samples_of_release
from corp_deploy.release.digests import read_stamp
from corp_deploy.release.recipe_file import load_recipe
from corp_deploy.store.checkpoint import load_checkpoint
from corp_deploy.store.manifest import load_effort, load_manifest
from corp_deploy.store.model_config import load_model_config
from export.engine.record import record_of_plan
from export.triton.config import read_expected
from perf.bench.latency_table import load_table
from perf.gate.history import load_trend
from perf.gate.verdicts import load_gate
from perf.parity.parity import load_parity
from perf.record.decoders import load_decoder_bench
from perf.record.runs import load_bench
from perf.stats.summary import summarise

MOST = 24
"""The most numbers that are written down of an output, evenly spaced."""


def inputs_of(model: nn.Module) -> list[Tensor]:
    """Return two inputs that depend on their shape alone; with a mask, the second one is padded."""
    batch = []
    for port in input_ports(model):
        shape = tuple(size if size > 0 else 6 for size in port.shape)
        count = 2 * int(torch.tensor(shape).prod())
        steps = torch.arange(count).reshape(2, *shape)
        if port.dtype == "float32":
            batch.append((steps * 37 % 101).float() / 50.0 - 1.0)
        elif "mask" in port.name:
            batch.append((steps % shape[-1] < shape[-1] - 2 * (steps >= shape[-1])).long())
        else:
            batch.append(steps * 7 % 60 + 4)
    return batch


def answers_of(model: nn.Module) -> dict[str, list[float]]:
    """Return the norm and some numbers of every output, by name."""
    with torch.inference_mode():
        outputs = model(*inputs_of(model))
    ports = output_ports(model)
    each = outputs if isinstance(outputs, tuple) else (outputs,)
    return {port.name: _figures(output) for port, output in zip(ports, each, strict=True)}


def _figures(tensor: Tensor) -> list[float]:
    flat = tensor.detach().double().flatten()
    return [float(flat.norm()), *flat[:: -(-len(flat) // MOST)].tolist()]


def figures_of_model(directory: Path) -> dict[str, Any]:
    checkpoint = load_checkpoint(directory)
    model = checkpoint.model
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "sparse": sorted(checkpoint.sparsity),
        "outputs": answers_of(model),
    }


def _of_sites(moments: Moments) -> dict[str, Any]:
    """Return the counts of every site, and the totals of its sums."""
    told: dict[str, Any] = {}
    for name, site in moments.sites.items():
        values = {field.name: getattr(site, field.name) for field in fields(site)}
        told[name] = {
            key: float(value.double().sum()) if isinstance(value, Tensor) else value
            for key, value in values.items()
            if value is not None
        }
    return told


def figures_of_moments(path: Path) -> dict[str, Any]:
    moments = load_moments(path)
    half = {} if moments.half is None else {"half": moments.half.images, "half_sites": _of_sites(moments.half)}
    return {"images": moments.images, "sites": _of_sites(moments), **half}


def _resumed(path: Path) -> dict[str, Any]:
    run = json.loads(load_moments(path).lineage[STATE]).get("run", {})
    reached = ResumeFile(path=path, every=1).load(run)
    assert reached is not None
    return {"position": reached[1].position, "images": reached[0].images}


def _polish(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["corp-deploy"])
    reached = StateFile(path=path, run=header.get("run", {})).load(torch.device("cpu"))
    return {name: float(tensor.double().norm()) for name, tensor in sorted(reached.matrices.items())}


def _bench(path: Path) -> dict[str, Any]:
    bench = load_bench(path)
    p50 = [side.p50_ms for row in summarise(bench).rows for side in row.sides.values()]
    return {"blocks": [len(row.blocks) for row in bench.rows], "p50_ms": [each and each.value for each in p50]}


def _parity(path: Path) -> dict[str, Any]:
    parity = load_parity(path)
    return {"verdict": parity.verdict, "links": {link.name: link.status for link in parity.links}}


def _gate(path: Path) -> dict[str, Any]:
    gate = load_gate(path)
    return {"verdict": gate.verdict, "rules": [rule.verdict for rule in gate.rules]}


def _table(path: Path) -> dict[str, Any]:
    table = load_table(path)
    return {"widths": table.widths, "p50_ms": [cell.p50_ms for cell in table.cells]}


def _decoders(path: Path) -> dict[str, Any]:
    record = load_decoder_bench(path)
    return {"lengths": [each.length for each in record.prefill], "token_bytes": record.caches["dense"].token_bytes}


def _engine(path: Path) -> dict[str, Any]:
    record = record_of_plan(path.with_name(path.name.removesuffix(".json")))
    return {"precision": record.precision, "kernels": record.kernels, "memory": record.device_memory_bytes}


def _samples(path: Path) -> dict[str, Any]:
    samples = samples_of_release(path.parents[1], max_relative_error=1e-3)
    return {"images": len(samples.images), "answers": float(samples.answers.sum())}


def _stamp(path: Path) -> dict[str, Any]:
    stamp = read_stamp(path.parent, path.stem)
    assert stamp is not None, path
    return {"outputs": sorted(stamp.outputs)}


def _release(path: Path) -> dict[str, Any]:
    checked = check_release(path)
    return {"differs": list(checked.differs), "replayed": checked.graphs_replayed, "name": checked.name}


def _answered(path: Path) -> dict[str, Any]:
    golden = read_golden(path.parent)
    return {"label": golden.source.label, "sum": float(golden.answers["logits"].sum())}


def _report(path: Path) -> dict[str, Any]:
    """Return which parts the report of a directory of records has."""
    content = gather_report(path.parent)
    shown = ("bench", "parity", "gate", "history", "calibration_size")
    parts = {key: getattr(content, key) for key in shown} | {"gate": content.gate.verdict}
    return {key: part is not None for key, part in parts.items()} | {
        "effects": len(content.effects),
        "effort": len(content.effort),
        "commands": len(content.commands),
    }


def _trial(path: Path) -> dict[str, Any]:
    folder = TrialFolder(path=path.parent, key=json.loads(path.read_text(encoding="utf-8"))["key"])
    point = folder.scores()
    assert point is not None, path
    return {"macs": point.macs, "relative_error": point.relative_error}


def _written(path: Path) -> dict[str, Any]:
    """Return kind, version and keys of a record that only other programs read."""
    record = json.loads(path.read_text(encoding="utf-8"))
    return {"kind": record["kind"], "version": record["version"], "keys": sorted(record)}


MODELS = ("vit", "vit-small", "vit-padded", "vit-sparse", "vit-merged", "vit-named", "llama-reduced")
MOMENTS = ("vit", "vit.held-out", "vit-small-grouped", "vit-small-system", "resnet-residual", "llama")
FIGURES: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    **{f"models/{name}": figures_of_model for name in MODELS},
    **{f"moments/{name}.safetensors": figures_of_moments for name in MOMENTS},
    "states/calibration.safetensors": _resumed,
    "states/polish.safetensors": _polish,
    "states/stamp.json": _stamp,
    "states/trial/score.json": _trial,
    "records/bench.json": _bench,
    "records/parity.json": _parity,
    "records/gate.json": _gate,
    "records/history.json": lambda path: {"releases": len(load_trend(path).releases)},
    "records/effort.json": lambda path: {"step": load_effort(path).step, "parts": list(load_effort(path).parts)},
    "records/manifest.json": lambda path: {"files": sorted(load_manifest(path).files)},
    "records/effects.json": _report,
    "records/calibration-size.json": _report,
    "records/golden/golden.json": _answered,
    "records/block.latency-table.json": _table,
    "records/decoder-bench.json": _decoders,
    "records/model.plan.json": _engine,
    **{f"records/{name}.json": _written
       for name in ("redundancy", "doctor", "sweep", "fusion-audit", "perplexity", "decoder-parity")},
    "release": _release,
    "release/moments.json": lambda path: {
        "lines": list(_calibrated(path.parent, load_model_config(path.parent / "reduced")))
    },
    "release/samples/samples.json": _samples,
    "release/repository/expected.json": lambda path: {"models": sorted(read_expected(path))},
    "release/recipe.toml": lambda path: {"name": load_recipe(path, trust_paths=True).name},
}  # fmt: skip
"""The function that reads each golden file, as the tool does, and returns the figures to write down."""
