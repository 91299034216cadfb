"""What a server would trip over in a model repository, found without a server and without a GPU."""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

from ground.errors import BadInput
from ground.transaction import FORMER

from .findings import ERROR, WARNING, LintFinding, finding, from_complaint
from .lint_artifact import openvino_limits, own_limits
from .lint_files import DEFAULT_FILES, foreign_config, foreign_files, lint_version
from .pbtxt import Field, Message, Name, ParseError, parse
from .server_releases import ServerRelease, server_release, vulnerability_warnings
from .versions import versions_of

_TENSOR = {"data_type": "name", "dims": "int", "zero_data": "bool", "random_data": "bool", "input_data_file": "text"}
_SHAPES = {"key": "text", "value": {"dim": "int"}}
_RESHAPE = {"shape": "int"}
_BUFFER = {"enable": "bool"}
_ACCELERATOR = {"name": "text", "parameters": {"key": "text", "value": "text"}}
_QUEUE_POLICY = {
    "timeout_action": "name",
    "default_timeout_microseconds": "int",
    "allow_timeout_override": "bool",
    "max_queue_size": "int",
}
_BORDER = {
    "name": "text",
    "data_type": "name",
    "dims": "int",
    "reshape": _RESHAPE,
    "is_shape_tensor": "bool",
    "is_non_linear_format_io": "bool",
}
FIELDS: dict[str, object] = {
    "name": "text",
    "platform": "text",
    "backend": "text",
    "runtime": "text",
    "max_batch_size": "int",
    "default_model_filename": "text",
    "version_policy": {"latest": {"num_versions": "int"}, "all": {}, "specific": {"versions": "int"}},
    "input": {**_BORDER, "format": "name", "allow_ragged_batch": "bool", "optional": "bool"},
    "output": {**_BORDER, "label_filename": "text"},
    "batch_input": None,
    "batch_output": None,
    "instance_group": {
        "name": "text",
        "kind": "name",
        "count": "int",
        "gpus": "int",
        "rate_limiter": None,
        "secondary_devices": None,
        "profile": "text",
        "passive": "bool",
        "host_policy": "text",
    },
    "dynamic_batching": {
        "preferred_batch_size": "int",
        "max_queue_delay_microseconds": "int",
        "preserve_ordering": "bool",
        "priority_levels": "int",
        "default_priority_level": "int",
        "default_queue_policy": _QUEUE_POLICY,
        "priority_queue_policy": {"key": "int", "value": _QUEUE_POLICY},
    },
    "sequence_batching": None,
    "ensemble_scheduling": None,
    "optimization": {
        "graph": {"level": "int"},
        "priority": "name",
        "cuda": {
            "graphs": "bool",
            "busy_wait_events": "bool",
            "output_copy_stream": "bool",
            "graph_spec": {
                "batch_size": "int",
                "input": _SHAPES,
                "graph_lower_bound": {"batch_size": "int", "input": _SHAPES},
            },
        },
        "execution_accelerators": {
            "gpu_execution_accelerator": _ACCELERATOR,
            "cpu_execution_accelerator": _ACCELERATOR,
        },
        "input_pinned_memory": _BUFFER,
        "output_pinned_memory": _BUFFER,
        "gather_kernel_buffer_threshold": "int",
        "eager_batching": "bool",
    },
    "cc_model_filenames": {"key": "text", "value": "text"},
    "metric_tags": {"key": "text", "value": "text"},
    "parameters": {"key": "text", "value": {"string_value": "text"}},
    "model_warmup": {"name": "text", "batch_size": "int", "count": "int", "inputs": {"key": "text", "value": _TENSOR}},
    "model_operations": None,
    "model_transaction_policy": {"decoupled": "bool"},
    "model_repository_agents": None,
    "response_cache": {"enable": "bool"},
    "model_metrics": None,
}
_KINDS = {"text": "a text in quotes", "int": "a whole number", "bool": "true or false", "name": "a bare word"}


def misused_fields(message: Message, fields: dict[str, object] = FIELDS, path: str = "") -> Iterator[tuple[int, str]]:
    """Line and complaint for every field that Triton does not know or that holds the wrong kind of value."""
    for field in message.fields:
        where = f"{path}{field.name}"
        if field.name not in fields:
            near = difflib.get_close_matches(field.name, fields, n=1)
            hint = f"; nearest known is {near[0]!r}" if near else ""
            yield field.line, f"{where} is no field of a model configuration{hint}"
            continue
        kind = fields[field.name]
        if isinstance(kind, dict):
            if isinstance(field.value, Message):
                yield from misused_fields(field.value, kind, f"{where}.")
            else:
                yield field.line, f"{where} holds fields in braces, got {field.value!r}"
        elif isinstance(kind, str) and not _holds(field, kind):
            yield field.line, f"{where} is {_KINDS[kind]}, got {field.value!r}"


def _holds(field: Field, kind: str) -> bool:
    value = field.value
    return {
        "text": isinstance(value, str) and not isinstance(value, Name),
        "int": type(value) is int,
        "bool": isinstance(value, bool) or (type(value) is int and value in (0, 1)),
        "name": isinstance(value, Name),
    }[kind]


MOST_BYTES = 2**20
HALF_DONE = f"a process was killed while it replaced files here ({FORMER} has what stood before)"
PLATFORMS = {"tensorrt_plan": "tensorrt", "onnxruntime_onnx": "onnxruntime"}


def lint_repository(repository: Path, server: str | None = None) -> tuple[LintFinding, ...]:
    """Every fault of every model, errors before warnings within a file; empty when a server can load it all.

    `server` is a release of the table, such as 26.07, to compare versions with. Raises BadInput when the directory
    holds no models at all.
    """
    if not repository.is_dir():
        raise BadInput(f"{repository}: there is no such directory; name the model repository")
    release = None if server is None else server_release(server)
    models = sorted(path for path in repository.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not models:
        raise BadInput(f"{repository}: no model directory in it; name the directory that holds them")
    findings = [each for model in models for each in _lint_model(model, release)]
    if (repository / FORMER).is_dir():
        findings.append(finding(repository, ERROR, HALF_DONE, "package or serve a version again: it is put back first"))
    if release is not None:
        findings += [
            finding(repository, WARNING, warning, "take a newer release") for warning in vulnerability_warnings(release)
        ]
    return tuple(sorted(set(findings), key=_order))


def _order(finding: LintFinding) -> tuple[str, int, int, str]:
    return str(finding.path), finding.severity == WARNING, finding.line or 0, finding.what


def _lint_model(model: Path, release: ServerRelease | None) -> Iterator[LintFinding]:
    yield from foreign_files(model)
    path = model / "config.pbtxt"
    if not path.is_file():
        yield finding(model, ERROR, "config.pbtxt is missing", "package it again, or remove the directory")
        return
    try:
        config = parse(_text(path))
    except ParseError as error:
        yield finding(path, ERROR, error.what, "correct the text", error.line)
        return
    except UnicodeDecodeError:
        yield finding(path, ERROR, "it is not text in UTF-8", "write it again")
        return
    for complaint in foreign_config(config):
        yield from_complaint(path, complaint)
    for line, what in misused_fields(config):
        yield finding(path, ERROR, what, "correct or remove it", line)
    for complaint in own_limits(config):
        yield from_complaint(path, complaint)
    if _backend(config) == "openvino":
        for complaint in openvino_limits(config):
            yield from_complaint(path, complaint)
    yield from _identity(model, config, path)
    backend = _backend(config)
    if backend in DEFAULT_FILES:
        for version in _served_versions(model, config):
            yield from lint_version(model / str(version), config, path, backend, release)


def _text(path: Path) -> str:
    """Raises ParseError for more text than any config has."""
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ParseError(f"it has {size} bytes, {MOST_BYTES} at most are read", 1)
    return path.read_text(encoding="utf-8")


def _identity(model: Path, config: Message, path: Path) -> Iterator[LintFinding]:
    name = config.text("name")
    if name and name != model.name:
        remedy = f"write name: {model.name!r} or rename the directory".replace("'", '"')
        yield finding(
            path, ERROR, f"the name is {name!r}, the directory {model.name!r}", remedy, config.line_of("name")
        )
    platform, backend = config.text("platform"), config.text("backend")
    if platform and backend and PLATFORMS.get(platform, backend) != backend:
        fault = f"platform {platform!r} belongs to the backend {PLATFORMS[platform]!r}, not to {backend!r}"
        yield finding(path, ERROR, fault, "keep the right one", config.line_of("backend"))
    if not platform and not backend:
        yield finding(path, ERROR, "neither backend nor platform is named", 'write backend: "..."', 1)
    for group in config.messages("instance_group"):
        if group.text("kind") == "KIND_CPU" and _backend(config) == "tensorrt":
            fault, remedy = "TensorRT plans don't run on the CPU", "write kind: KIND_GPU, or serve the ONNX model there"
            yield finding(path, ERROR, fault, remedy, group.line_of("kind"))
    yield from _versions(model, config, path)


def _versions(model: Path, config: Message, path: Path) -> Iterator[LintFinding]:
    for entry in sorted(model.iterdir()):
        if entry.is_dir() and re.fullmatch(r"0\d*", entry.name):
            yield finding(entry, ERROR, "versions count from 1, without leading zeros", "rename the directory")
    have = versions_of(model)
    if not have:
        yield finding(model, ERROR, "there is no version directory", "put the artefact into 1/")
    policy = config.message("version_policy") or Message((), 1)
    for field in (policy.message("specific") or Message((), 1)).all("versions"):
        if field.value not in have:
            fault = f"version {field.value} is to be served, on disk are {', '.join(map(str, have)) or 'none'}"
            yield finding(path, ERROR, fault, "name a version that is there, or package it again", field.line)


def _served_versions(model: Path, config: Message) -> tuple[int, ...]:
    have = versions_of(model)
    policy = config.message("version_policy") or Message((), 1)
    specific = policy.message("specific")
    if specific is not None:
        return tuple(version for version in have if version in {field.value for field in specific.all("versions")})
    if policy.message("all") is not None:
        return have
    count = (policy.message("latest") or Message((), 1)).number("num_versions", 1)
    return have[-max(count, 1) :]


def _backend(config: Message) -> str:
    return config.text("backend") or PLATFORMS.get(config.text("platform"), "")
