"""One valid record of each kind, smaller than any that is measured."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from calib import store
from corp_deploy.proof.report_input import reduction_of
from corp_deploy.release.digests import KnownDigests, Stamp
from corp_deploy.store.hub_snapshot import config_of_directory, model_of_snapshot
from corp_deploy.store.manifest import load_manifest
from corp_deploy.store.model_config import ModelConfig, load_model_config
from export.engine.record import EngineRecord, record_of_plan
from export.triton.config import expected_text, read_expected
from ground.ports import image_port
from ground.records import record_from_file
from perf.bench.latency_table import Cell, LatencyTable, load_table, save_table
from perf.gate.gate import Gate, JudgedRule
from perf.gate.verdicts import load_gate, save_gate
from perf.parity.link import link
from perf.parity.parity import ImageSet, Parity, load_parity
from perf.parity.tolerance import limits
from perf.record.runs import Bench, BenchTrial, GpuState, Row, SubjectRecord, TimedBlock, load_bench, save_bench
from tests.export_served import engine_record

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("dense", "reduced")
STATE = GpuState(
    sm_clock_mhz=1, memory_clock_mhz=None, temperature_c=3, power_w=4.5, throttle=("heat",), foreign_processes=0
)


def bench() -> Bench:
    block = TimedBlock(round=0, subject="dense", at_s=0.0, calls=1, wall_ms=1.0, compute_ms=(1.0,), gpu=STATE)
    trial = BenchTrial(status="ok", warm_up_samples_ms=(1.0,))
    row = Row(
        batch=1, trials=dict.fromkeys(NAMES, trial), calls_per_block=1, settle_calls=0, stop="narrow", blocks=(block,),
        noise_blocks=(block,),
    )  # fmt: skip
    return Bench(
        created="now",
        command=("bench",),
        environment={"cpu": "a cpu", "cpu_count": 2},
        settings={"streams": 1},
        subjects=(SubjectRecord(name="dense", describe={"half": False}), SubjectRecord(name="reduced", describe={})),
        rows=(row,),
        warnings=("warm",),
    )


def parity() -> Parity:
    same = np.eye(3)
    proof = link(
        name="whole", kind="whole", reference="a", candidate="b", reference_rows=same, candidate_by_batch={1: same},
        tolerance=limits(),
    )  # fmt: skip
    return Parity(images=ImageSet(count=3, digest="sha256:0"), links=(proof,))


def table() -> LatencyTable:
    cells = (Cell(width=8, batch=1, samples_ms=(1.0, 2.0), disturbed=False),)
    return LatencyTable(
        name="mlp", fingerprint="f", describe={"cpu": "a cpu"}, inputs=(image_port((3, 4, 4)),), cells=cells
    )


def engine() -> EngineRecord:
    return engine_record(
        kernels=3, kernel_kinds={"gemm": 2}, attention_sites=("blocks.0.attn",), fused_attention_sites=(),
        options={"sparse": False}, roles={"images": "embedding"},
    )  # fmt: skip


def config() -> dict[str, Any]:
    digits: dict[str, Any] = json.loads((ROOT / "examples/digits/model/config.json").read_text())
    site = {
        **dict.fromkeys(("width_dense", "width", "width_asked"), 4),
        **dict.fromkeys(("energy", "error_uncompensated", "error", "r2", "condition", "ridge"), 0.5),
        "site": "blocks.0.mlp",
        "part": "mlp",
        "held_out": {"energy": 1.0, "error": 0.1},
    }
    way = {"name": "by site", "share": 0.5, "predicted_error": 0.1, "measured_error": 0.2}
    coverage = {"verdict": "1 of 1 sites reduced", "refused": {"blocks.1.mlp": "too small"}}
    reduction = {"sites": [site], "ways": [way], "decided": ["padded heads"], "coverage": coverage}
    return digits | {"lineage": {"reduction": reduction}}


def gate() -> Gate:
    return Gate(rules=(JudgedRule(rule="p50@b1 > 1", verdict="PASS", message="fine", metric="p50", value=1.0),))


SNAPSHOT = {
    "architecture": "vit_tiny_patch16_224",
    "num_classes": 7,
    "model_args": {"img_size": 32},
    "pretrained_cfg": {"input_size": [3, 32, 32], "mean": [0.5], "std": [0.5], "crop_pct": 1, "crop_mode": "center"},
}
MANIFEST = {
    "command": "demo",
    "versions": {"torch": "2"},
    "files": {"a": {"sha256": "0", "size_bytes": 1, "made_by": ""}},
}
HEADER = {
    "images": 3,
    "lineage": {"model": "m"},
    "order": ["a", "b"],
    "sites": {"a": {"type": "mlp", "tokens": 3, "eps": 1e-6}, "b": {"type": "attention", "images": 3, "tokens": 3}},
    "sha256": {"image_ids": "0"},
}


Record = tuple[str, dict[str, Any], Callable[[Path], object]]
"""The file that it stands in, one valid record, and its reader."""


def read_config(path: Path) -> object:
    read: ModelConfig = load_model_config(path.parent)
    return reduction_of(read, path.parent)


def written(save: Callable[[Any, Path], None], value: object, path: Path) -> dict[str, Any]:
    save(value, path)
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def valid_records(at: Path) -> dict[str, Record]:
    """By name; `at` is written to."""
    stamp = {"kind": "corp-deploy/stamp", "version": 1, "inputs": {"a": "b"}, "outputs": {"c": "d"}}
    digests = {"kind": "corp-deploy/digests", "version": 1, "files": {"/a": [1, 2, "d"]}}
    expected = json.loads(expected_text({"vit": {"1": {"measured_on": None}}}))
    header = {"kind": store.KIND, "version": store.VERSION, **HEADER}
    return {
        "bench": ("bench.json", written(save_bench, bench(), at), load_bench),
        "parity": ("parity.json", json.loads(json.dumps(parity().to_json())), load_parity),
        "gate": ("gate.json", written(save_gate, gate(), at), load_gate),
        "table": ("t.json", written(save_table, table(), at), load_table),
        "engine": ("m.plan.json", json.loads(engine().to_json()), lambda path: record_of_plan(path.with_suffix(""))),
        "config": ("config.json", config(), read_config),
        "snapshot": (
            "config.json", SNAPSHOT, lambda path: model_of_snapshot(path.parent, config_of_directory(path.parent)),
        ),
        "manifest": (
            "manifest.json", {"kind": "corp-deploy/manifest", "version": 1, **MANIFEST},
            lambda path: load_manifest(path.parent),
        ),
        "expected": ("expected.json", expected, read_expected),
        "stamp": ("s.json", stamp, lambda path: record_from_file(path, Stamp)),
        "digests": ("d.json", digests, lambda path: record_from_file(path, KnownDigests)),
        "moments": (
            "m.json", header,
            lambda path: record_from_file(path, store._Header, kind=store.KIND, version=store.VERSION),
        ),
    }  # fmt: skip
