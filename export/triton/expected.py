"""What a served model should show, written beside it with the command lines of the perf client that check it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ground.errors import BadInput
from ground.records import record_from_file

from .config import Variant
from .signature import FLOATING

EXPECTED_NAME = "expected.json"
VERSION = 1
KIND = "expected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """The median time of one call and its interval, in ms; `measure` is compute or end_to_end."""

    batch: int
    measure: str
    p50_ms: float
    low_ms: float
    high_ms: float

    def __post_init__(self) -> None:
        if self.batch < 1 or self.measure not in ("compute", "end_to_end"):
            raise BadInput(f"expected latency: batch at least 1 and compute or end_to_end, got {self}")
        if not 0.0 <= self.low_ms <= self.p50_ms <= self.high_ms:
            raise BadInput(f"expected latency: 0 <= low <= p50 <= high does not hold in {self}")

    def as_json(self) -> dict[str, Any]:
        interval = [self.low_ms, self.high_ms]
        return {"batch": self.batch, "measure": self.measure, "p50_ms": self.p50_ms, "interval_ms": interval}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The share of `images` on which the artefact's first class is the reference's, with its interval if known."""

    share: float
    images: int
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0 or self.images < 1:
            raise BadInput(f"expected agreement: a share in [0, 1] over at least one image, got {self}")

    def as_json(self) -> dict[str, Any]:
        interval = None if self.low is None or self.high is None else [self.low, self.high]
        return {"share": self.share, "interval": interval, "images": self.images}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What was measured of one artefact, and on what."""

    measured_on: str
    latencies: tuple[Latency, ...] = ()
    top1_agreement: Agreement | None = None


class _Document(msgspec.Struct, frozen=True):
    models: dict[str, dict[str, dict[str, Any]]]


def read_expected(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The entries by model and version; empty when the file is not there yet."""
    if not path.exists():
        return {}
    again = "remove it and package again"
    return record_from_file(path, _Document, kind=KIND, version=VERSION, remedy=again).models


def expected_text(models: Mapping[str, Any]) -> str:
    """The file of `read_expected`."""
    return json.dumps({"version": VERSION, "kind": KIND, "models": models}, indent=2) + "\n"


def expected_entry(variant: Variant, version: int, expected: Expected | None) -> dict[str, Any]:
    """One model's entry: figures (none were given: null), what its outputs are for, how to start and to measure it."""
    latencies = None if expected is None else [each.as_json() for each in expected.latencies]
    agreement = None if expected is None else expected.top1_agreement
    batches = [each.batch for each in expected.latencies] if expected else []
    # Outputs that no client asks for; a request has to name the others, or it is sent these too.
    breaks = [tensor.name for tensor in variant.signature.fusion_breaks if variant.backend == "tensorrt"]
    return {
        "measured_on": expected.measured_on if expected else None,
        "latencies": latencies,
        "top1_agreement": None if agreement is None else agreement.as_json(),
        "outputs": {tensor.name: tensor.role for tensor in variant.signature.outputs},
        **({"fusion_breaks": breaks} if breaks else {}),
        "serve": f"tritonserver --model-repository=. --model-control-mode=explicit --load-model={variant.name}",
        "client": _client_commands(variant, version, batches or [max(1, variant.max_batch)]),
    }


def _client_commands(variant: Variant, version: int, batches: list[int]) -> list[str]:
    """perf_analyzer over gRPC, one request at a time, so that its p50 stands beside the measured end to end time."""
    batched = variant.max_batch > 0
    sizes = [[f"-b {size}"] for size in batches if size <= variant.max_batch] if batched else [[]]
    inputs = variant.signature.inputs
    shapes = [f"--shape {each.name}:{','.join(map(str, each.dims(batched=batched)))}" for each in inputs]
    # Random whole numbers would lie far outside an embedding's rows; of pixels any will do.
    floating = all(tensor.data_type in (*FLOATING, "TYPE_UINT8") for tensor in inputs)
    head = f"perf_analyzer -m {variant.name} -x {version} -i grpc -u localhost:8001"
    tail = "--concurrency-range 1 --percentile=50 --measurement-mode count_windows --measurement-request-count 662"
    return [" ".join((head, *size, *shapes, *([] if floating else ["--input-data zero"]), tail)) for size in sizes]
