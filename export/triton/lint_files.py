"""Faults of the files of a served version: against their config, and files that run foreign code or lead elsewhere.

A server looks for backends' libraries in a model's folders first, imports model.py, and follows all paths.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from export.engine.record import EngineRecord, record_of_plan, record_path, sha256_of
from export.graph.package_notes import SUFFIX
from ground.built_engines import is_built_here
from ground.errors import BadInput
from ground.files import escapes_directory, sha256_of_file

from .aoti import FILE, PLATFORM, lint_package
from .lint_artifact import ERROR, WARNING, LintFinding, artifact_faults, at_path, config_error, finds
from .pbtxt import Field, Message
from .server_releases import ServerRelease, onnx_warnings, plan_warnings
from .signature import signature_from_onnx, signature_from_record
from .variants import BACKEND_MODEL

BACKENDS = ("onnxruntime", "openvino", "python", "pytorch", "tensorrt")
PLATFORMS = ("ensemble", "onnxruntime_onnx", "tensorrt_plan", PLATFORM)
# Fields, at any depth, that name a file below the model's directory.
NAMES_OF_FILES = ("default_model_filename", "input_data_file", "label_filename")
# Parameters that backends use as a path to code or to an archive of it.
CODE_PARAMETERS = ("CPU_EXTENSION_PATH", "EXECUTION_ENV_PATH", "TRITON_BATCH_STRATEGY_PATH", "op_library_filename")
_LIBRARY = re.compile(r"\.(so(\.[0-9.]+)?|dll|dylib)$", re.IGNORECASE)
_CODE = re.compile(r"\.(py[a-z]?|pth|pt2?|pkl|pickle|jar|egg)$", re.IGNORECASE)


@finds("foreign-file")
def foreign_files(model: Path, trust_packages: bool = False) -> Iterator[LintFinding]:
    if model.is_symlink():
        yield LintFinding(model, ERROR, f"a link, to {model.readlink()}", "put the model itself there")
    own = BACKEND_MODEL.read_bytes()
    for folder, folders, files in os.walk(model):
        for path in sorted(Path(folder) / name for name in (*folders, *files)):
            if what := _fault_message(path, own, trust_packages):
                yield LintFinding(path, ERROR, what, "remove it; package the model again from a release of yours")


def _fault_message(path: Path, own: bytes, trust_packages: bool) -> str:
    if path.is_symlink():
        return f"a link, to {path.readlink()}: a server would follow it"
    if path.is_dir():
        return ""
    if not path.is_file():
        return "neither file nor directory: a server may wait for it for ever"
    if _LIBRARY.search(path.name):
        return "a library: a server loads one from here before its own"
    if path.name == "model.py" and path.stat().st_size == len(own) and path.read_bytes() == own:
        return ""
    if path.suffix == SUFFIX:
        if trust_packages or is_built_here(sha256_of_file(path)):
            return ""
        return "native code that was not compiled here, which the server would run; --trust-engine accepts it"
    return "code that this tool didn't write, which the server would run" if _CODE.search(path.name) else ""


@finds("foreign-config")
def foreign_config(config: Message) -> Iterator[LintFinding]:
    known = {
        "backend": ("a backend that this tool doesn't know", BACKENDS),
        "platform": ("a platform that this tool doesn't know", PLATFORMS),
    }
    for name, (what, names) in known.items():
        if (text := config.text(name)) and text not in names:
            yield config_error(config.line_of(name), f"{what}, {text!r}", f"known: {', '.join(names)}")
    for name, what in (("runtime", "names the library that runs the model"), ("model_repository_agents", "loads code")):
        if (field := config.one(name)) is not None:
            yield config_error(field.line, f"{name} {what}", "remove it")
    for within, field in _fields(config):
        if isinstance(field.value, Message):
            yield from _parameter(field.value, field.line) if field.name == "parameters" else ()
            continue
        is_renamed = within == "cc_model_filenames" and field.name == "value"
        is_path = (is_renamed or field.name in NAMES_OF_FILES) and isinstance(field.value, str) and field.value != ""
        if is_path and escapes_directory(str(field.value)):
            name = within if is_renamed else field.name
            fault = f"{name} {str(field.value)[:100]!r} leads out of the model's directory"
            yield config_error(field.line, fault, "name a file in it")


def _fields(message: Message, within: str = "") -> Iterator[tuple[str, Field]]:
    for field in message.fields:
        yield within, field
        if isinstance(field.value, Message):
            yield from _fields(field.value, field.name)


def _parameter(entry: Message, line: int) -> Iterator[LintFinding]:
    key, value = entry.text("key"), entry.inner("value").text("string_value") or entry.text("value")
    if key in CODE_PARAMETERS or key.upper().endswith("_PATH") or _LIBRARY.search(value):
        yield config_error(line, f"parameter {key!r} names code or a path, {value[:100]!r}", "remove it")
    elif value.startswith(("/", "~")) or ".." in value.split("/"):
        yield config_error(line, f"parameter {key!r} leads out of the model, {value[:100]!r}", "remove it")


MOST_LABELS_BYTES = 2**26
DEFAULT_FILES = {
    "tensorrt": "model.plan",
    "onnxruntime": "model.onnx",
    "python": "model.py",
    "openvino": "model.xml",
    "pytorch": FILE,
}


@finds("artefact")
def lint_version(
    folder: Path, config: Message, path: Path, backend: str, release: ServerRelease | None
) -> Iterator[LintFinding]:
    yield from _labels(folder, config, path)
    files = _artifact_files(config, backend)
    for name, line in files.items():
        if escapes_directory(name):
            continue  # foreign_config reports it
        if not (folder / name).is_file():
            fault = f"{name} is missing in {folder.name}/" + (", config.pbtxt names it" if line else "")
            yield LintFinding(path if line else folder, ERROR, fault, "build or package it again", line)
            continue
        if backend == "tensorrt":
            yield from _lint_plan(folder / name, config, path, release)
        if backend == "pytorch":
            yield from lint_package(folder / name, config, path, release)
        if name.endswith(".xml") and not (folder / name).with_suffix(".bin").is_file():
            fault = f"{Path(name).with_suffix('.bin')} with the weights of {name} is missing in {folder.name}/"
            yield LintFinding(folder, ERROR, fault, "save the model again, or serve model.onnx")
    default = "model.onnx" if backend == "python" else DEFAULT_FILES[backend]
    graph = folder / (default if backend == "python" else config.text("default_model_filename", default))
    if backend != "tensorrt" and graph.suffix == ".onnx" and graph.is_file():
        yield from _lint_graph(graph, config, path, release if backend == "onnxruntime" else None)


def _artifact_files(config: Message, backend: str) -> dict[str, int | None]:
    files: dict[str, int | None] = {each.text("value"): each.line for each in config.messages("cc_model_filenames")}
    field = config.one("default_model_filename")
    if files and field is None:
        return files
    default = config.text("default_model_filename", DEFAULT_FILES[backend])
    return {default: None if field is None else field.line} | files


@finds("plan")
def _lint_plan(plan: Path, config: Message, path: Path, release: ServerRelease | None) -> Iterator[LintFinding]:
    beside = record_path(plan)
    if not beside.is_file():
        fault = f"there is no record {beside.name}, so the plan can't be compared with its config here"
        yield LintFinding(plan, WARNING, fault, "keep the record beside the plan")
        return
    try:
        record = record_of_plan(plan, where=beside.name)
        signature = signature_from_record(record)
    except BadInput as error:
        yield LintFinding(beside, ERROR, str(error), "build the plan again")
        return
    if record.plan_sha256 != sha256_of(plan.read_bytes()):
        yield LintFinding(plan, ERROR, f"its bytes are not those that {beside.name} describes", "package it again")
    if record.backend != "tensorrt":
        fault = f"it was built for {record.backend}, which Triton does not load"
        yield LintFinding(plan, ERROR, fault, "build it with TensorRT, by the build script")
    yield from _capability(plan, record, config, path)
    written = replace(signature, outputs=(*signature.outputs, *signature.fusion_breaks))
    yield from at_path(path, artifact_faults(config, written, plan.name))
    if release is not None:
        compatible = record.options.get("version_compatible") is True
        for fault in plan_warnings(release, record.library_version, version_compatible=compatible):
            remedy = "see the build script beside the ONNX model"
            yield LintFinding(plan, WARNING, fault, remedy, rule="server")


def _capability(plan: Path, record: EngineRecord, config: Message, path: Path) -> Iterator[LintFinding]:
    for entry in config.messages("cc_model_filenames"):
        key = entry.text("key")
        if not re.fullmatch(r"\d{1,2}\.\d", key):
            yield LintFinding(path, ERROR, f'compute capability {key!r} is not like "8.6"', "write it so", entry.line)
        elif entry.text("value") == plan.name and record.targets != (key.replace(".", ""),):
            fault = f"{plan.name} stands for compute capability {key}, it was built for SM {', '.join(record.targets)}"
            yield LintFinding(path, ERROR, fault, "name the plan of that GPU", entry.line)


@finds("artefact")
def _lint_graph(graph: Path, config: Message, path: Path, release: ServerRelease | None) -> Iterator[LintFinding]:
    try:
        signature = signature_from_onnx(graph)
    except BadInput as error:
        yield LintFinding(graph, ERROR, str(error), "package it again")
        return
    yield from at_path(path, artifact_faults(config, signature, graph.name))
    if release is not None:
        for fault in onnx_warnings(release, opset=signature.opset, ir=signature.ir):
            yield LintFinding(graph, WARNING, fault, "or take a newer server", rule="server")


@finds("labels")
def _labels(folder: Path, config: Message, path: Path) -> Iterator[LintFinding]:
    for output in config.messages("output"):
        name, line = output.text("label_filename"), output.line_of("label_filename")
        if not name or escapes_directory(name):
            continue
        file = folder.parent / name
        if not file.is_file():
            yield LintFinding(path, ERROR, f"the label file {name} is missing", "package the labels again", line)
            continue
        if file.stat().st_size > MOST_LABELS_BYTES:
            yield LintFinding(file, ERROR, f"it is larger than {MOST_LABELS_BYTES} bytes", "write one line per class")
            continue
        labels = [text for text in file.read_text(errors="replace").splitlines() if text.strip()]
        (*_, classes) = output.numbers("dims") or (0,)
        if classes > 0 and len(labels) != classes:
            fault = f"{len(labels)} labels for {classes} outputs of {output.text('name')}"
            yield LintFinding(file, ERROR, fault, "write one line per class")
