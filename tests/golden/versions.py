"""The version that a golden file says it is of, read and set anew in a copy, wherever the file keeps it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from calib.calibrate import STATE
from calib.store import HEADER, _signed

KEPT = {
    "corp-deploy/model": "models/vit-padded/config.json",
    "calib.moments": "moments/vit.safetensors",
    "calib.resume": "states/calibration.safetensors",
    "corp-deploy/polish-state": "states/polish.safetensors",
    "corp-deploy/moments-reference": "release/moments.json",
    "calib.redundancy": "records/redundancy.json",
    "corp-deploy/calibration-size": "records/calibration-size.json",
    "corp-deploy/effort": "records/effort.json",
    "bench": "records/bench.json",
    "parity": "records/parity.json",
    "gate": "records/gate.json",
    "history": "records/history.json",
    "corp-deploy/effects": "records/effects.json",
    "latency-table": "records/block.latency-table.json",
    "corp-deploy/sweep": "records/sweep.json",
    "corp-deploy/sweep-trial": "states/trial/score.json",
    "engine": "records/model.plan.json",
    "fusion-audit": "records/fusion-audit.json",
    "golden": "records/golden/golden.json",
    "expected": "release/repository/expected.json",
    "corp-deploy/manifest": "records/manifest.json",
    "corp-deploy/samples": "release/samples/samples.json",
    "corp-deploy/stamp": "states/stamp.json",
    "corp-deploy/perplexity": "records/perplexity.json",
    "decoder-parity": "records/decoder-parity.json",
    "decoder-bench": "records/decoder-bench.json",
    "corp-deploy/doctor": "records/doctor.json",
}
"""By kind its file in the golden folders."""
Change = Callable[[dict[str, Any]], None]


def _in_header(path: Path, key: str, change: Change) -> None:
    """Of what a safetensors file carries under a key, with the digest that moments have of it."""
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header = json.loads(metadata[key])
    signed = header.pop("header_sha256", None) is not None
    change(header)
    save_file(tensors, path, metadata={**metadata, key: _signed(header) if signed else json.dumps(header)})


def change_head(path: Path, kind: str, change: Change) -> None:
    """Let `change` alter what holds the kind and the version of a file."""

    def of_state(header: dict[str, Any]) -> None:
        state = json.loads(header["lineage"][STATE])
        change(state)
        header["lineage"][STATE] = json.dumps(state, sort_keys=True)

    if path.suffix == ".safetensors":
        key = "corp-deploy" if kind == "corp-deploy/polish-state" else HEADER
        _in_header(path, key, of_state if kind == STATE else change)
        return
    record = json.loads(path.read_text(encoding="utf-8"))
    change(record)
    path.write_text(json.dumps(record), encoding="utf-8")


def head_of(path: Path, kind: str) -> tuple[Any, Any]:
    """The kind and the version that a file tells; the file stays."""
    if path.suffix != ".safetensors":
        record = json.loads(path.read_text(encoding="utf-8"))
        return record["kind"], record["version"]
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    header = json.loads(metadata["corp-deploy" if kind == "corp-deploy/polish-state" else HEADER])
    header = json.loads(header["lineage"][STATE]) if kind == STATE else header
    return header["kind"], header["version"]


def set_version(path: Path, kind: str, version: Any) -> None:
    change_head(path, kind, lambda head: head.update(version=version))
