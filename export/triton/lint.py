"""The lint of a model repository: faults that a server would fail on, found without a server or a GPU."""

import difflib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ground.errors import BadInput
from ground.transaction import FORMER

from .aoti import BACKEND, platform_faults
from .config import PLATFORMS as PLATFORM_OF
from .lint_artifact import (
    ERROR,
    WARNING,
    LintFinding,
    at_path,
    batching_faults,
    config_error,
    finds,
    openvino_faults,
)
from .lint_files import DEFAULT_FILES, foreign_config, foreign_files, lint_version
from .pbtxt import Message, Name, ParseError, parse
from .server_releases import ServerRelease, server_release, vulnerability_warnings
from .versions import versions_of


def _fields(text: str = "", number: str = "", truth: str = "", word: str = "", **others: Any) -> dict[str, Any]:
    """Return kinds by field, from the fields of each kind in one text; `others`: inner fields, or None if unchecked."""
    names = {"text": text, "int": number, "bool": truth, "name": word}
    return {name: kind for kind, each in names.items() for name in each.split()} | others


_TEXTS = _fields("key value")
_TENSOR = _fields("input_data_file", "dims", "zero_data random_data", "data_type")
_SHAPES = _fields("key", value=_fields(number="dim"))
_ACCELERATOR = _fields("name", parameters=_TEXTS)
_QUEUE_POLICY = _fields(
    "", "default_timeout_microseconds max_queue_size", "allow_timeout_override", word="timeout_action"
)
_BORDER = _fields(
    "name", "dims", "is_shape_tensor is_non_linear_format_io", "data_type", reshape=_fields(number="shape")
)
_NOT_LOOKED_INTO = (
    "batch_input", "batch_output", "sequence_batching", "ensemble_scheduling", "model_operations",
    "model_repository_agents", "model_metrics",
)  # fmt: skip
FIELDS: dict[str, Any] = dict.fromkeys(_NOT_LOOKED_INTO) | _fields(
    "name platform backend runtime default_model_filename",
    "max_batch_size",
    version_policy={"latest": _fields(number="num_versions"), "all": {}, "specific": _fields(number="versions")},
    input=_BORDER | _fields(truth="allow_ragged_batch optional", word="format"),
    output=_BORDER | _fields("label_filename"),
    instance_group=_fields(
        "name profile host_policy", "count gpus", "passive", "kind", rate_limiter=None, secondary_devices=None
    ),
    dynamic_batching=_fields(
        number="preferred_batch_size max_queue_delay_microseconds priority_levels default_priority_level",
        truth="preserve_ordering",
        default_queue_policy=_QUEUE_POLICY,
        priority_queue_policy=_fields(number="key", value=_QUEUE_POLICY),
    ),
    optimization=_fields(
        number="gather_kernel_buffer_threshold",
        truth="eager_batching",
        word="priority",
        graph=_fields(number="level"),
        cuda=_fields(
            truth="graphs busy_wait_events output_copy_stream",
            graph_spec=_fields(
                number="batch_size", input=_SHAPES, graph_lower_bound=_fields(number="batch_size", input=_SHAPES)
            ),
        ),
        execution_accelerators=dict.fromkeys(("gpu_execution_accelerator", "cpu_execution_accelerator"), _ACCELERATOR),
        input_pinned_memory=_fields(truth="enable"),
        output_pinned_memory=_fields(truth="enable"),
    ),
    cc_model_filenames=_TEXTS,
    metric_tags=_TEXTS,
    parameters=_fields("key", value=_fields("string_value")),
    model_warmup=_fields("name", "batch_size count", inputs=_fields("key", value=_TENSOR)),
    model_transaction_policy=_fields(truth="decoupled"),
    response_cache=_fields(truth="enable"),
)
_KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "text": ("a text in quotes", lambda value: isinstance(value, str) and not isinstance(value, Name)),
    "int": ("a whole number", lambda value: type(value) is int),
    "bool": ("true or false", lambda value: isinstance(value, bool) or (type(value) is int and value in (0, 1))),
    "name": ("a bare word", lambda value: isinstance(value, Name)),
}


def misused_fields(message: Message, fields: dict[str, Any] = FIELDS, path: str = "") -> Iterator[tuple[int, str]]:
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
                yield field.line, f"{where}: expected fields in braces, got {field.value!r}"
        elif isinstance(kind, str) and not _KINDS[kind][1](field.value):
            yield field.line, f"{where}: expected {_KINDS[kind][0]}, got {field.value!r}"


MOST_BYTES = 2**20
HALF_DONE = f"a process was killed while it replaced files here ({FORMER} holds the former files)"
PLATFORMS = {platform: backend for backend, platform in PLATFORM_OF.items()}


def lint_repository(
    repository: Path, server: str | None = None, *, trust_packages: bool = False
) -> tuple[LintFinding, ...]:
    """Return all faults of all models, errors first within a file.

    `server` is a release, such as 26.07, to compare versions with. A package of AOTInductor that was compiled elsewhere
    is an error unless `trust_packages`. Raises BadInput for a directory without models.
    """
    if not repository.is_dir():
        raise BadInput(f"{repository}: there is no such directory; name the model repository")
    release = None if server is None else server_release(server)
    models = sorted(path for path in repository.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not models:
        raise BadInput(f"{repository}: no model directory in it; name the directory that holds them")
    findings = [each for model in models for each in _lint_model(model, release, trust_packages)]
    if (repository / FORMER).is_dir():
        remedy = "package or serve a version again, which restores them first"
        findings.append(LintFinding(repository, ERROR, HALF_DONE, remedy, rule="artefact"))
    if release is not None:
        findings += [
            LintFinding(repository, WARNING, warning, "take a newer release", rule="server")
            for warning in vulnerability_warnings(release)
        ]
    return tuple(
        sorted(set(findings), key=lambda each: (str(each.path), each.severity == WARNING, each.line or 0, each.what))
    )


@finds("config")
def _lint_model(model: Path, release: ServerRelease | None, trust_packages: bool) -> Iterator[LintFinding]:
    yield from foreign_files(model, trust_packages)
    path = model / "config.pbtxt"
    if not path.is_file():
        yield LintFinding(model, ERROR, "config.pbtxt is missing", "package it again, or remove the directory")
        return
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ParseError(f"it has {size} bytes, {MOST_BYTES} at most are read", 1)
        config = parse(path.read_text(encoding="utf-8-sig"))
    except ParseError as fault:
        yield LintFinding(path, ERROR, fault.what, "correct the text", fault.line)
        return
    except UnicodeDecodeError:
        yield LintFinding(path, ERROR, "it is not text in UTF-8", "write it again")
        return
    yield from at_path(path, _config_faults(model, config))
    have, backend = versions_of(model), _backend(config)
    for entry in sorted(model.iterdir()):
        if entry.is_dir() and re.fullmatch(r"0\d*", entry.name):
            what = "versions count from 1, without leading zeros"
            yield LintFinding(entry, ERROR, what, "rename the directory", rule="version")
    if not have:
        yield LintFinding(model, ERROR, "there is no version directory", "put the artefact into 1/", rule="version")
    for version in _served_versions(have, config) if backend in DEFAULT_FILES else ():
        yield from lint_version(model / str(version), config, path, backend, release)


@finds("backend")
def _config_faults(model: Path, config: Message) -> Iterator[LintFinding]:
    yield from foreign_config(config)
    for line, what in misused_fields(config):
        yield config_error(line, what, "correct or remove it", rule="field")
    yield from batching_faults(config)
    if _backend(config) == "openvino":
        yield from openvino_faults(config)
    if _backend(config) == BACKEND:
        yield from platform_faults(config)
    name, platform, backend = (config.text(each) for each in ("name", "platform", "backend"))
    if name and name != model.name:
        remedy = f"write name: {model.name!r} or rename the directory".replace("'", '"')
        fault = f"the name is {name!r}, the directory {model.name!r}"
        yield config_error(config.line_of("name"), fault, remedy, rule="name")
    if platform and backend and PLATFORMS.get(platform, backend) != backend:
        fault = f"platform {platform!r} belongs to the backend {PLATFORMS[platform]!r}, not to {backend!r}"
        yield config_error(config.line_of("backend"), fault, "keep the right one")
    if not platform and not backend:
        yield config_error(1, "neither backend nor platform is named", 'write backend: "..."')
    for group in config.messages("instance_group"):
        if group.text("kind") == "KIND_CPU" and _backend(config) == "tensorrt":
            remedy = "write kind: KIND_GPU, or serve the ONNX model there"
            yield config_error(group.line_of("kind"), "TensorRT plans don't run on the CPU", remedy)
    have = versions_of(model)
    for field in config.inner("version_policy").inner("specific").all("versions"):
        if field.value not in have:
            fault = f"version {field.value} is to be served, on disk are {', '.join(map(str, have)) or 'none'}"
            remedy = "name a version that is there, or package it again"
            yield config_error(field.line, fault, remedy, rule="version")


def _served_versions(have: tuple[int, ...], config: Message) -> tuple[int, ...]:
    policy = config.inner("version_policy")
    if policy.message("specific") is not None:
        return tuple(version for version in have if version in policy.inner("specific").numbers("versions"))
    if policy.message("all") is not None:
        return have
    return have[-max(policy.inner("latest").number("num_versions", 1), 1) :]


def _backend(config: Message) -> str:
    return config.text("backend") or PLATFORMS.get(config.text("platform"), "")
