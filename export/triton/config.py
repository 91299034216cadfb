"""The config.pbtxt of one served model, made from its artefact and from what was measured."""

from collections.abc import Mapping
from dataclasses import dataclass

from ground.errors import BadInput

from .pbtxt import Name, Plain, pbtxt_from
from .signature import Signature, Tensor

LABELS_NAME = "labels.txt"
DEFAULT_MAX_BATCH = 8
POLICIES = ("latest", "all", "specific")
# Of the last two the server's own.
THREAD_KEYS = {
    "python": "intra_op_threads",
    "onnxruntime": "intra_op_thread_count",
    "openvino": "INFERENCE_NUM_THREADS",
}
CPU_BACKENDS = tuple(THREAD_KEYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How a server is to run the models.

    `preferred_batches` is the measured knee (one size or several); requests wait at most `queue_delay_us` for such a
    batch. `max_batch` limits graphs with an open batch, a plan always gets its profiles' maximum; None takes the plan's
    maximum, or 8 without plans. `graph_batches` are the sizes at which CUDA graphs were measured (plans only).
    `policy` latest serves the newest version, all every one, specific the one just written. `cpu_backend` python runs
    ONNX Runtime inside the Python backend, onnxruntime and openvino use the server's own backends; `cpu_bf16` has the
    latter compute in BF16.
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

    def __post_init__(self) -> None:
        for name in ("preferred_batches", "graph_batches"):
            sizes = getattr(self, name)
            if any(size < 1 for size in sizes) or len(set(sizes)) < len(sizes):
                raise BadInput(f"{name.replace('_', ' ')}: each must be at least 1 and unique, got {sizes}")
        for name, least in (("queue_delay_us", 0), ("instances", 1), ("max_batch", 1), ("cpu_threads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BadInput(f"{name.replace('_', ' ')} must be at least {least}, got {value}")
        if self.policy not in POLICIES:
            raise BadInput(f"version policy {self.policy!r} is unknown; choose one of {', '.join(POLICIES)}")
        if self.cpu_backend not in CPU_BACKENDS:
            raise BadInput(f"CPU backend {self.cpu_backend!r} is unknown; choose {' or '.join(CPU_BACKENDS)}")
        if self.cpu_bf16 and self.cpu_backend != "openvino":
            raise BadInput(f"BF16 on the CPU is for the CPU backend openvino, got {self.cpu_backend}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One served model: its name, what runs it, and the files that Triton does not find by their default name."""

    name: str
    backend: str
    kind: str
    signature: Signature
    max_batch: int
    cc_filenames: Mapping[str, str]
    graph_batches: tuple[int, ...] = ()
    threads: int | None = None


def config_text(variant: Variant, serving: Serving, version: int, *, labelled: bool) -> str:
    """config.pbtxt with one warm-up request for every batch size that a profile names or the batcher prefers.

    A fixed batch is no batching to Triton: max_batch_size 0 and dims with the batch in front. So is the OpenVINO
    backend's: it would compute the largest batch for every request.
    """
    batched = variant.max_batch > 0
    fields: dict[str, Plain] = {"name": variant.name, "backend": variant.backend}
    platform = {"tensorrt": "tensorrt_plan", "onnxruntime": "onnxruntime_onnx"}.get(variant.backend)
    if platform is not None:
        fields["platform"] = platform
    if variant.backend == "openvino":
        fields["default_model_filename"] = "model.onnx"  # where it would look for model.xml
    fields["max_batch_size"] = variant.max_batch
    fields["input"] = [_tensor(tensor, batched) for tensor in variant.signature.inputs]
    label_file: dict[str, Plain] = {"label_filename": f"{version}/{LABELS_NAME}"} if labelled else {}
    # The server loads no plan of which an output is not described; nobody asks for these, so none is sent.
    breaks = variant.signature.fusion_breaks if variant.backend == "tensorrt" else ()
    fields["output"] = [
        _tensor(tensor, batched) | (label_file if tensor.role == "logits" else {})
        for tensor in (*variant.signature.outputs, *breaks)
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
    fields["model_warmup"] = [_warmup(variant, size) for size in _warmup_batches(variant, serving)]
    return pbtxt_from(fields)


def _parameters(variant: Variant, serving: Serving) -> dict[str, str]:
    """What a backend is told by keys of its own."""
    parameters = {}
    if variant.backend == "openvino":
        parameters = {"NUM_STREAMS": str(serving.instances), "PERFORMANCE_HINT": "LATENCY"}
        if serving.cpu_bf16:
            parameters["HINT_BF16"] = "YES"
    if variant.threads is not None:
        parameters[THREAD_KEYS[variant.backend]] = str(variant.threads)
    return parameters


def _warmup_batches(variant: Variant, serving: Serving) -> list[int]:
    """1, what the profiles name and what the batcher prefers, within the limits; [1] without batching."""
    signature = variant.signature
    sizes = {signature.smallest_batch, *signature.profile_batches, *serving.preferred_batches, variant.max_batch}
    return sorted(size for size in sizes if size <= variant.max_batch) if variant.max_batch > 0 else [1]


def _tensor(tensor: Tensor, batched: bool) -> dict[str, Plain]:
    return {"name": tensor.name, "data_type": Name(tensor.data_type), "dims": list(tensor.dims(batched=batched))}


def _warmup(variant: Variant, size: int) -> Plain:
    inputs: list[Plain] = []
    for tensor in variant.signature.inputs:
        dims = [max(each, 1) for each in tensor.dims(batched=variant.max_batch > 0)]
        value: dict[str, Plain] = {"data_type": Name(tensor.data_type), "dims": dims, "zero_data": True}
        inputs.append({"key": tensor.name, "value": value})
    return {"name": f"batch_{size}", "batch_size": size, "inputs": inputs}
