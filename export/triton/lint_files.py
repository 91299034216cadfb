"""The files of one served version against the config that names them and against each other."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from export.engine.record import EngineRecord, record_of_plan, record_path, sha256_of
from ground.errors import BadInput
from ground.files import escapes_directory

from .findings import ERROR, WARNING, LintFinding, finding, from_complaint
from .lint_artifact import against_artifact
from .pbtxt import Message
from .server_releases import ServerRelease, onnx_warnings, plan_warnings
from .signature import signature_from_onnx, signature_from_record

MOST_LABELS_BYTES = 2**26
DEFAULT_FILES = {"tensorrt": "model.plan", "onnxruntime": "model.onnx", "python": "model.py", "openvino": "model.xml"}


def lint_version(
    folder: Path, config: Message, path: Path, backend: str, release: ServerRelease | None
) -> Iterator[LintFinding]:
    """What is wrong in the version directory `folder` of a model whose config.pbtxt is `path`."""
    yield from _labels(folder, config, path)
    files = _artifact_files(config, backend)
    for name, line in files.items():
        if escapes_directory(name):
            continue  # told of where paths are
        if not (folder / name).is_file():
            fault = f"{name} is missing in {folder.name}/" + (", config.pbtxt names it" if line else "")
            yield finding(path if line else folder, ERROR, fault, "build or package it again", line)
            continue
        if backend == "tensorrt":
            yield from _lint_plan(folder / name, config, path, release)
        if name.endswith(".xml") and not (folder / name).with_suffix(".bin").is_file():
            fault = f"{Path(name).with_suffix('.bin')} with the weights of {name} is missing in {folder.name}/"
            yield finding(folder, ERROR, fault, "save the model again, or serve model.onnx")
    graph = _graph_file(folder, config, backend)
    if graph is not None:
        yield from _lint_graph(graph, config, path, release if backend == "onnxruntime" else None)


def _artifact_files(config: Message, backend: str) -> dict[str, int | None]:
    """Each file that the server opens, with the line that names it; None where it is the default name."""
    by_capability = {message.text("value"): message.line for message in config.messages("cc_model_filenames")}
    field = config.one("default_model_filename")
    if by_capability and field is None:
        return dict(by_capability)
    default: dict[str, int | None] = {config.text("default_model_filename", DEFAULT_FILES[backend]): None}
    if field is not None:
        default = dict.fromkeys(default, field.line)
    return default | by_capability


def _graph_file(folder: Path, config: Message, backend: str) -> Path | None:
    if backend == "tensorrt":
        return None
    own = backend in ("onnxruntime", "openvino")
    name = config.text("default_model_filename", DEFAULT_FILES[backend]) if own else "model.onnx"
    return folder / name if name.endswith(".onnx") and (folder / name).is_file() else None


def _lint_plan(plan: Path, config: Message, path: Path, release: ServerRelease | None) -> Iterator[LintFinding]:
    beside = record_path(plan)
    if not beside.is_file():
        fault = f"there is no record {beside.name}, so the plan can't be compared with its config here"
        yield finding(plan, WARNING, fault, "keep the record beside the plan")
        return
    try:
        record = record_of_plan(plan, where=beside.name)
        signature = signature_from_record(record)
    except BadInput as error:
        yield finding(beside, ERROR, str(error), "build the plan again")
        return
    if record.plan_sha256 != sha256_of(plan.read_bytes()):
        yield finding(plan, ERROR, f"its bytes are not those that {beside.name} describes", "package it again")
    if record.backend != "tensorrt":
        fault = f"it was built for {record.backend}, which Triton does not load"
        yield finding(plan, ERROR, fault, "build it with TensorRT, by the build script")
    yield from _capability(plan, record, config, path)
    written = replace(signature, outputs=(*signature.outputs, *signature.fusion_breaks))
    for complaint in against_artifact(config, written, plan.name):
        yield from_complaint(path, complaint)
    if release is not None:
        compatible = record.options.get("version_compatible") is True
        for fault in plan_warnings(release, record.library_version, version_compatible=compatible):
            yield finding(plan, WARNING, fault, "see the build script beside the ONNX model")


def _capability(plan: Path, record: EngineRecord, config: Message, path: Path) -> Iterator[LintFinding]:
    for entry in config.messages("cc_model_filenames"):
        key = entry.text("key")
        if not re.fullmatch(r"\d{1,2}\.\d", key):
            yield finding(path, ERROR, f'compute capability {key!r} is not like "8.6"', "write it so", entry.line)
        elif entry.text("value") == plan.name and record.targets != (key.replace(".", ""),):
            fault = f"{plan.name} stands for compute capability {key}, it was built for SM {', '.join(record.targets)}"
            yield finding(path, ERROR, fault, "name the plan of that GPU", entry.line)


def _lint_graph(graph: Path, config: Message, path: Path, release: ServerRelease | None) -> Iterator[LintFinding]:
    try:
        signature = signature_from_onnx(graph)
    except BadInput as error:
        yield finding(graph, ERROR, str(error), "package it again")
        return
    for complaint in against_artifact(config, signature, graph.name):
        yield from_complaint(path, complaint)
    if release is not None:
        for fault in onnx_warnings(release, opset=signature.opset, ir=signature.ir):
            yield finding(graph, WARNING, fault, "or take a newer server")


def _labels(folder: Path, config: Message, path: Path) -> Iterator[LintFinding]:
    for output in config.messages("output"):
        name, line = output.text("label_filename"), output.line_of("label_filename")
        if not name:
            continue
        file = folder.parent / name
        if escapes_directory(name):
            continue
        if not file.is_file():
            yield finding(path, ERROR, f"the label file {name} is missing", "package the labels again", line)
            continue
        if file.stat().st_size > MOST_LABELS_BYTES:
            yield finding(file, ERROR, f"it is larger than {MOST_LABELS_BYTES} bytes", "write one line per class")
            continue
        labels = [text for text in file.read_text(errors="replace").splitlines() if text.strip()]
        classes = next((field.value for field in reversed(output.all("dims"))), None)
        if isinstance(classes, int) and classes > 0 and len(labels) != classes:
            fault = f"{len(labels)} labels for {classes} outputs of {output.text('name')}"
            yield finding(file, ERROR, fault, "write one line per class")
