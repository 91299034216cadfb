"""The config.pbtxt of one served model, and its expected figures with the perf client's commands to check them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from export.graph.ports import GraphPort
from ground.files import write_json
from ground.records import record_from_file

from .pbtxt import Name, Plain, pbtxt_from
from .signature import FLOATING, SERVED_TYPES, Signature

LABELS_NAME = "labels.txt"
DEFAULT_MAX_BATCH = 8
# Parameters that set the number of threads; the last two are the server's own.
THREAD_KEYS = {
    "python": "intra_op_threads",
    "onnxruntime": "intra_op_thread_count",
    "openvino": "INFERENCE_NUM_THREADS",
}
PLATFORMS = {"tensorrt": "tensorrt_plan", "onnxruntime": "onnxruntime_onnx", "pytorch": "torch_aoti"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Settings of a server for the models.

    The batcher waits at most `queue_delay_us` to fill one of `preferred_batches`. `max_batch`: None for the plan's
    maximum, or 8. `graph_batches`: batch sizes to capture as CUDA graphs (plans only). `policy` latest serves the
    newest version, all every version, specific the one just written. `cpu_backend` python runs ONNX Runtime in the
    Python backend; `cpu_bf16` is for openvino.
    """

    preferred_batches: tuple[int, ...] = ()
    queue_delay_us: int = 500
    instances: int = 1
    max_batch: int | None = None
    graph_batches: tuple[int, ...] = ()
    policy: str = "latest"
    cpu_backend: str = "python"
    cpu_threads: int | None = None
    cpu_bf16: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A served model: `files` of its version directory are paths or texts, `pending` is its plan until it is built."""

    name: str
    backend: str
    kind: str
    signature: Signature
    max_batch: int
    cc_filenames: Mapping[str, str]
    graph_batches: tuple[int, ...] = ()
    threads: int | None = None
    files: Mapping[str, Path | str] = field(default_factory=dict)
    expected: "Expected | None" = None
    pending: "ServedModel | None" = None


def config_text(variant: ServedModel, serving: Serving, version: int, *, labelled: bool) -> str:
    """Return config.pbtxt with a warm-up request for every batch size of profiles and batcher.

    Triton batches no requests to models with a fixed batch, nor to packages of AOTInductor, nor to OpenVINO, which
    would compute the largest batch for every request.
    """
    batched, signature = variant.max_batch > 0, variant.signature
    fields: dict[str, Plain] = {"name": variant.name, "backend": variant.backend}
    if variant.backend in PLATFORMS:
        fields["platform"] = PLATFORMS[variant.backend]
    if variant.backend == "openvino":
        fields["default_model_filename"] = "model.onnx"  # its default is model.xml
    fields["max_batch_size"] = variant.max_batch
    fields["input"] = [_tensor(tensor, batched) for tensor in signature.inputs]
    label_file: dict[str, Plain] = {"label_filename": f"{version}/{LABELS_NAME}"} if labelled else {}
    # The server loads no plan with an output that isn't described; it sends none that no client asks for.
    breaks = signature.fusion_breaks if variant.backend == "tensorrt" else ()
    fields["output"] = [
        _tensor(tensor, batched) | (label_file if signature.output_roles.get(tensor.name) == "logits" else {})
        for tensor in (*signature.outputs, *breaks)
    ]
    fields["instance_group"] = {"kind": Name(variant.kind), "count": serving.instances}
    of_policy: dict[str, Plain] = {"latest": {"num_versions": 1}, "all": {}, "specific": {"versions": [version]}}
    fields["version_policy"] = {serving.policy: of_policy[serving.policy]}
    if batched:
        preferred = {"preferred_batch_size": sorted(serving.preferred_batches)} if serving.preferred_batches else {}
        fields["dynamic_batching"] = {**preferred, "max_queue_delay_microseconds": serving.queue_delay_us}
    if variant.graph_batches:
        specs = [{"batch_size": size} for size in variant.graph_batches]
        fields["optimization"] = {"cuda": {"graphs": True, "graph_spec": specs}}
    if variant.cc_filenames:
        fields["cc_model_filenames"] = [{"key": key, "value": name} for key, name in variant.cc_filenames.items()]
    if parameters := _parameters(variant, serving):
        fields["parameters"] = [{"key": key, "value": {"string_value": text}} for key, text in parameters.items()]
    sizes = {signature.smallest_batch, *signature.profile_batches, *serving.preferred_batches, variant.max_batch}
    batches = sorted(size for size in sizes if size <= variant.max_batch) if batched else [1]
    fields["model_warmup"] = [_warmup(variant, size) for size in batches]
    return pbtxt_from(fields)


def _parameters(variant: ServedModel, serving: Serving) -> dict[str, str]:
    parameters = {}
    if variant.backend == "openvino":
        parameters = {"NUM_STREAMS": str(serving.instances), "PERFORMANCE_HINT": "LATENCY"}
        if serving.cpu_bf16:
            parameters["HINT_BF16"] = "YES"
    if variant.threads is not None:
        parameters[THREAD_KEYS[variant.backend]] = str(variant.threads)
    return parameters


def _tensor(tensor: GraphPort, batched: bool) -> dict[str, Plain]:
    """Return the entry of a tensor; a server needs at least one dim, so clients see a single number as [1]."""
    dims = list(tensor.dims(batched=batched))
    return {
        "name": tensor.name,
        "data_type": Name(SERVED_TYPES[tensor.dtype]),
        "dims": dims or [1],
        **({} if dims else {"reshape": {"shape": []}}),
    }


def _warmup(variant: ServedModel, size: int) -> Plain:
    inputs: list[Plain] = []
    for tensor in variant.signature.inputs:
        dims = [max(each, 1) for each in tensor.dims(batched=variant.max_batch > 0)]
        value: dict[str, Plain] = {"data_type": Name(SERVED_TYPES[tensor.dtype]), "dims": dims, "zero_data": True}
        inputs.append({"key": tensor.name, "value": value})
    return {"name": f"batch_{size}", "batch_size": size, "inputs": inputs}


EXPECTED_NAME = "expected.json"
VERSION = 1
KIND = "expected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """The median compute time of a batch, with its interval."""

    batch: int
    p50_ms: float
    low_ms: float
    high_ms: float

    def as_json(self) -> dict[str, Any]:
        interval = [self.low_ms, self.high_ms]
        return {"batch": self.batch, "measure": "compute", "p50_ms": self.p50_ms, "interval_ms": interval}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    share: float
    images: int
    low: float
    high: float

    def as_json(self) -> dict[str, Any]:
        return {"share": self.share, "interval": [self.low, self.high], "images": self.images}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The measured figures of one artefact, and the machine."""

    measured_on: str
    latencies: tuple[Latency, ...] = ()
    top1_agreement: Agreement | None = None


class _Document(msgspec.Struct, frozen=True):
    models: dict[str, dict[str, dict[str, Any]]]


def read_expected(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    if not path.exists():
        return {}
    again = "remove it and package again"
    return record_from_file(path, _Document, kind=KIND, version=VERSION, remedy=again).models


def write_expected(path: Path, models: Mapping[str, Any]) -> None:
    write_json(path, {"version": VERSION, "kind": KIND, "models": models})


def expected_entry(variant: ServedModel, version: int, proof: Mapping[str, str]) -> dict[str, Any]:
    """Return one model's figures, proof, output roles, and the commands that serve and measure it."""
    expected = variant.expected
    latencies = None if expected is None else [each.as_json() for each in expected.latencies]
    agreement = None if expected is None else expected.top1_agreement
    batches = [each.batch for each in expected.latencies] if expected else []
    # A request has to name the other outputs, or it gets these, too.
    breaks = [tensor.name for tensor in variant.signature.fusion_breaks if variant.backend == "tensorrt"]
    return {
        "measured_on": expected.measured_on if expected else None,
        "latencies": latencies,
        "top1_agreement": None if agreement is None else agreement.as_json(),
        "proof": dict(proof),
        "outputs": variant.signature.output_roles,
        **({"fusion_breaks": breaks} if breaks else {}),
        "serve": f"tritonserver --model-repository=. --model-control-mode=explicit --load-model={variant.name}",
        "client": _client_commands(variant, version, batches or [max(1, variant.max_batch)]),
    }


def _client_commands(variant: ServedModel, version: int, batches: list[int]) -> list[str]:
    """Return perf_analyzer commands over gRPC, one request at a time, whose p50 compares with the measured one."""
    batched = variant.max_batch > 0
    sizes = [[f"-b {size}"] for size in batches if size <= variant.max_batch] if batched else [[]]
    inputs = variant.signature.inputs
    shapes = [f"--shape {each.name}:{','.join(map(str, each.dims(batched=batched)))}" for each in inputs]
    # Random whole numbers may exceed an embedding's rows; random pixels are fine.
    floating = all(tensor.dtype in (*FLOATING, "uint8") for tensor in inputs)
    head = f"perf_analyzer -m {variant.name} -x {version} -i grpc -u localhost:8001"
    tail = "--concurrency-range 1 --percentile=50 --measurement-mode count_windows --measurement-request-count 662"
    return [" ".join((head, *size, *shapes, *([] if floating else ["--input-data zero"]), tail)) for size in sizes]
