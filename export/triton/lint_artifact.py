"""Faults of a config: by itself, and against the artefact that it serves."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import ParamSpec

from export.graph.ports import GraphPort

from .pbtxt import Message
from .signature import SERVED_TYPES, Signature

ERROR = "error"
WARNING = "warning"
CONFIG = Path("config.pbtxt")
RULES = {
    "aotinductor": "The config of a package of AOTInductor is one that the platform torch_aoti serves.",
    "artefact": "Every file that a config needs is in the version's directory, and can be read.",
    "backend": "A config names a backend that can run the model where it is to run.",
    "batch": "The largest batch of a config is one that its artefact takes.",
    "batching": "Preferred batches and CUDA graphs are within the largest batch.",
    "config": "config.pbtxt is there, and is text of a model configuration.",
    "field": "A config has fields of a model configuration only, with values of their types.",
    "foreign-config": "A config names no code, no library and no path that leads out of its model.",
    "foreign-file": "A model has no link, no library and no code that package didn't write, which a server would run.",
    "labels": "A label file has one line for each class.",
    "name": "A model's name is that of its directory.",
    "openvino": "The OpenVINO backend reads the parameters of a config, and serves its batches.",
    "plan": "A plan is the one that its record describes, for the GPU that the config names.",
    "port": "Inputs and outputs of a config are those of its artefact, with their types and dims.",
    "server": "The server release loads the artefact, and has no published vulnerability.",
    "version": "The versions that a config serves are on disk, in directories that count from 1.",
    "warm-up": "Warm-up requests are ones that the artefact takes, at every batch that a profile begins with.",
}
"""The rules of the lint by id, each with what it demands."""
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class LintFinding:
    """A fault: its severity (an error keeps a model from loading or serving), file and line, and what to do.

    `rule` is an id of RULES, empty until the check that found the fault names it.
    """

    path: Path
    severity: str
    what: str
    remedy: str
    line: int | None = None
    rule: str = ""

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else f"{self.path}"
        return f"{where}: {self.severity}: {self.what}; {self.remedy}"


def config_error(line: int, what: str, remedy: str, *, rule: str = "") -> LintFinding:
    return LintFinding(CONFIG, ERROR, what, remedy, line, rule)


def config_warning(line: int, what: str, remedy: str) -> LintFinding:
    return LintFinding(CONFIG, WARNING, what, remedy, line)


def at_path(path: Path, faults: Iterable[LintFinding]) -> Iterator[LintFinding]:
    return (replace(each, path=path) for each in faults)


def finds(rule: str) -> Callable[[Callable[P, Iterator[LintFinding]]], Callable[P, Iterator[LintFinding]]]:
    """Return the decorator of a check, which gives its findings this rule unless they have one."""
    assert rule in RULES, rule

    def decorate(check: Callable[P, Iterator[LintFinding]]) -> Callable[P, Iterator[LintFinding]]:
        @wraps(check)
        def named(*args: P.args, **kwargs: P.kwargs) -> Iterator[LintFinding]:
            return (each if each.rule else replace(each, rule=rule) for each in check(*args, **kwargs))

        return named

    return decorate


_SWITCH = r"(?i)yes|no"
# Values of the keys that the backend reads; it ignores other keys without a word.
PARAMETERS = {
    "CPU_EXTENSION_PATH": r".+",
    "INFERENCE_NUM_THREADS": r"\d+",
    "COMPILATION_NUM_THREADS": r"\d+",
    "HINT_BF16": r"(?i)yes",
    "NUM_STREAMS": r"(?i)auto|numa|\d+",
    "PERFORMANCE_HINT": r"(?i)latency|throughput|cumulative_throughput",
    "SKIP_OV_DYNAMIC_BATCHSIZE": _SWITCH,
    "ENABLE_BATCH_PADDING": _SWITCH,
    "RESHAPE_IO_LAYERS": _SWITCH,
    "TARGET_DEVICE": r".+",
}


@finds("openvino")
def openvino_faults(config: Message) -> Iterator[LintFinding]:
    parameters = {}
    for entry in config.messages("parameters"):
        key, value = entry.text("key"), entry.inner("value").text("string_value")
        parameters[key] = value
        if key not in PARAMETERS:
            fault = f"parameter {key!r} is ignored by the OpenVINO backend, which doesn't know it"
            yield config_warning(entry.line, fault, f"known are {', '.join(PARAMETERS)}")
        elif not re.fullmatch(PARAMETERS[key], value):
            remedy = f"write what it takes: {PARAMETERS[key].removeprefix('(?i)')}"
            yield config_error(entry.line, f"parameter {key} is {value!r}", remedy)
    groups = config.messages("instance_group")
    for group in groups:
        if (kind := group.text("kind")) not in ("KIND_CPU", "KIND_AUTO", ""):
            fault = f"the OpenVINO backend runs on the CPU, got {kind}"
            yield config_error(group.line_of("kind"), fault, "write kind: KIND_CPU")
    if all(group.text("kind") != "KIND_CPU" for group in groups):
        fault = "without kind KIND_CPU a server with a GPU starts the model there, which the backend refuses"
        yield config_warning(config.line_of("instance_group"), fault, "write kind: KIND_CPU")
    limit, line = config.number("max_batch_size"), config.line_of("max_batch_size")
    remedy = "write max_batch_size: 0 and -1 in front of the dims"
    if limit > 1 and parameters.get("ENABLE_BATCH_PADDING", "").lower() == "yes":
        yield config_warning(line, f"every request is padded to a batch of {limit} and computed as such", remedy)
    elif limit > 1:
        fault = f"requests of fewer than {limit} fail: the OpenVINO backend fixes the batch at max_batch_size"
        yield config_error(line, fault, f"{remedy}, or set ENABLE_BATCH_PADDING to YES")


def artifact_faults(config: Message, signature: Signature, source: str) -> Iterator[LintFinding]:
    batched = config.number("max_batch_size") > 0
    yield from _port_faults(config, "input", signature.inputs, batched, source)
    yield from _port_faults(config, "output", signature.outputs, batched, source)
    yield from _batches(config, signature, source)
    yield from _warmups(config, signature, batched)


@finds("batching")
def batching_faults(config: Message) -> Iterator[LintFinding]:
    limit = config.number("max_batch_size")
    batching = config.message("dynamic_batching")
    if batching is not None and limit == 0:
        line = config.line_of("dynamic_batching")
        yield config_error(
            line, "dynamic_batching without batches: max_batch_size is 0", "remove it or set max_batch_size"
        )
    if batching is not None and limit > 0:
        for field in batching.all("preferred_batch_size"):
            if isinstance(field.value, int) and not 1 <= field.value <= limit:
                fault = f"preferred batch {field.value} is outside 1 to max_batch_size {limit}"
                yield config_error(field.line, fault, f"prefer sizes up to {limit}")
    cuda = config.inner("optimization").inner("cuda")
    for spec in cuda.messages("graph_spec"):
        size = spec.number("batch_size")
        if size > limit:
            fault = f"a CUDA graph for batch {size} is beyond max_batch_size {limit}"
            yield config_error(spec.line, fault, f"name sizes up to {limit}, those that were measured")
    if cuda.messages("graph_spec") and cuda.one("graphs") is None:
        yield config_warning(cuda.line, "graph_spec has no effect without graphs: true", "add graphs: true")


@finds("port")
def _port_faults(
    config: Message, field: str, tensors: tuple[GraphPort, ...], batched: bool, source: str
) -> Iterator[LintFinding]:
    described = {message.text("name"): message for message in config.messages(field)}
    tensors_by_name = {tensor.name: tensor for tensor in tensors}
    for name, message in described.items():
        if name not in tensors_by_name:
            have = ", ".join(map(repr, tensors_by_name)) or "none"
            yield config_error(
                message.line, f"{source} has no {field} {name!r}, only {have}", "name it as the artefact does"
            )
            continue
        tensor = tensors_by_name[name]
        if message.text("data_type") != (served := SERVED_TYPES[tensor.dtype]):
            line, received = message.line_of("data_type"), message.text("data_type") or "nothing"
            fault = f"{field} {name} is {served} in {source}, got {received}"
            yield config_error(line, fault, f"write data_type: {served}")
        yield from _dims(message, tensor, field, batched, source)
    for name in tensors_by_name.keys() - described.keys():
        line = config.line_of(field)
        yield config_error(
            line, f"{field} {name!r} of {source} is not described", f"add an entry for {name!r} to {field}"
        )


def _dims(message: Message, tensor: GraphPort, field: str, batched: bool, source: str) -> Iterator[LintFinding]:
    if message.one("reshape") is not None:
        return  # dims are then those of the request
    received, dims = message.numbers("dims"), tensor.dims(batched=batched)
    if (
        received
        and len(received) == len(dims)
        and all(-1 in pair or pair[0] == pair[1] for pair in zip(received, dims, strict=True))
    ):
        return
    fault = f"{field} {tensor.name} has dims {list(dims)} in {source}, got {list(received)}"
    remedy = f"write dims: {list(dims)}" if dims else "write dims: [1] and reshape { shape: [] }"
    if received and received == tensor.dims(batched=not batched):
        remedy += ", without the batch" if batched else ", with the batch: max_batch_size is 0"
    yield config_error(message.line_of("dims"), fault, remedy)


@finds("batch")
def _batches(config: Message, signature: Signature, source: str) -> Iterator[LintFinding]:
    limit, line = config.number("max_batch_size"), config.line_of("max_batch_size")
    fixed, largest = signature.fixed_batch, signature.largest_batch
    if fixed is not None and limit > 0:
        fault = f"max_batch_size is {limit}, but {source} takes batches of {fixed} only"
        yield config_error(line, fault, f"write max_batch_size: 0 and put {fixed} in front of the dims")
    elif fixed is None and limit == 0 and config.text("backend") not in ("openvino", "pytorch"):
        fault = f"max_batch_size is 0, but the batch of {source} is open"
        yield config_warning(line, fault, f"write max_batch_size: {largest or 8} and leave the batch out of the dims")
    elif largest is not None and limit > largest:
        fault = f"max_batch_size is {limit}, but {source} was built for batches up to {largest}"
        yield config_error(line, fault, f"write max_batch_size: {largest}, or build a profile up to {limit}")
    elif largest is not None and 0 < limit < largest:
        fault = f"max_batch_size is {limit}, though {source} takes batches up to {largest}"
        yield config_warning(line, fault, f"write max_batch_size: {largest}")
    if limit > 0 and signature.smallest_batch > 1:
        fault = f"{source} takes no batch below {signature.smallest_batch}, so a request of one is refused"
        yield config_error(line, fault, "build the profile from 1 on")


@finds("warm-up")
def _warmups(config: Message, signature: Signature, batched: bool) -> Iterator[LintFinding]:
    limit = config.number("max_batch_size")
    tensors_by_name = {tensor.name: tensor for tensor in signature.inputs}
    warmed = set()
    for sample in config.messages("model_warmup"):
        size = sample.number("batch_size")
        warmed.add(size)
        if not 1 <= size <= max(limit, 1):
            fault = f"warm-up {sample.text('name')!r} has batch {size}, outside 1 to {max(limit, 1)}"
            yield config_error(sample.line_of("batch_size"), fault, "warm up sizes that the model takes")
        yield from _warmup_inputs(sample, tensors_by_name, batched)
    profile_sizes = set(signature.profile_batches) if batched else {1}
    cold = sorted(size for size in profile_sizes - warmed if size <= max(limit, 1))
    if cold:
        fault = f"no warm-up for batch {', '.join(map(str, cold))}, whose first request will be slow"
        yield config_warning(config.line_of("model_warmup"), fault, "add a model_warmup entry for each")


def _warmup_inputs(sample: Message, inputs: dict[str, GraphPort], batched: bool) -> Iterator[LintFinding]:
    filled = {entry.text("key"): entry for entry in sample.messages("inputs")}
    where = f"warm-up {sample.text('name')!r}"
    for name in sorted(filled.keys() ^ inputs.keys()):
        fault = f"{where} fills {name!r}, which is no input" if name in filled else f"{where} does not fill {name!r}"
        yield config_error(sample.line, fault, f"fill {', '.join(inputs)}")
    for name in filled.keys() & inputs.keys():
        value = filled[name].inner("value")
        received = value.numbers("dims")
        dims = inputs[name].dims(batched=batched)
        if len(received) != len(dims) or any(w not in (-1, g) or g < 1 for g, w in zip(received, dims, strict=True)):
            fault = f"{where} gives {name} dims {list(received)}, it takes {list(dims)}"
            yield config_error(value.line_of("dims"), fault, f"write dims: {list(dims)}")
        if value.text("data_type") != (served := SERVED_TYPES[inputs[name].dtype]):
            fault = f"{where} gives {name} as {value.text('data_type') or 'nothing'}, it takes {served}"
            yield config_error(value.line_of("data_type"), fault, f"write data_type: {served}")
        if not any(value.one(source) for source in ("zero_data", "random_data", "input_data_file")):
            yield config_error(value.line, f"{where} has no data for {name}", "add zero_data: true")
