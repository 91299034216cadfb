"""What of a model repository would run somebody's code in the server, or lead it to files elsewhere.

A server looks for the libraries of its backends in the folders of a model before its own, imports model.py, and follows
paths of config.pbtxt wherever they lead.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ground.files import escapes_directory

from .findings import ERROR, Complaint, LintFinding, finding
from .pbtxt import Field, Message
from .variants import BACKEND_MODEL

BACKENDS = ("onnxruntime", "openvino", "python", "tensorrt")
PLATFORMS = ("", "ensemble", "onnxruntime_onnx", "tensorrt_plan")
# Fields of any depth that name a file below the model's directory.
NAMES_OF_FILES = ("default_model_filename", "input_data_file", "label_filename")
# Parameters that backends take for a path to code, or to what is unpacked into it.
CODE_PARAMETERS = ("CPU_EXTENSION_PATH", "EXECUTION_ENV_PATH", "TRITON_BATCH_STRATEGY_PATH", "op_library_filename")
_LIBRARY = re.compile(r"\.(so(\.[0-9.]+)?|dll|dylib)$", re.IGNORECASE)
_CODE = re.compile(r"\.(py[a-z]?|pth|pt2?|pkl|pickle|jar|egg)$", re.IGNORECASE)


def foreign_files(model: Path) -> Iterator[LintFinding]:
    """Links, libraries and code in the folders of a model, but for the model.py of this tool."""
    if model.is_symlink():
        yield finding(model, ERROR, f"a link, to {model.readlink()}", "put the model itself there")
    own = BACKEND_MODEL.read_bytes()
    for folder, folders, files in os.walk(model):
        for path in sorted(Path(folder) / name for name in (*folders, *files)):
            what = _fault_message(path, own)
            if what:
                yield finding(path, ERROR, what, "remove it; package the model again from a release of yours")


def _fault_message(path: Path, own: bytes) -> str:
    if path.is_symlink():
        return f"a link, to {path.readlink()}: a server would read what stands there"
    if path.is_dir():
        return ""
    if not path.is_file():
        return "neither file nor directory, which a server may wait on for ever"
    if _LIBRARY.search(path.name):
        return "a library: a server takes one from here before its own"
    if path.name == "model.py" and path.stat().st_size == len(own) and path.read_bytes() == own:
        return ""
    return "code that is not of this tool, which the server would run" if _CODE.search(path.name) else ""


def foreign_config(config: Message) -> Iterator[Complaint]:
    """Backends, agents, parameters and paths that bring code, or lead out of the model's directory."""
    backend, platform = config.text("backend"), config.text("platform")
    if backend and backend not in BACKENDS:
        yield _error(
            config.one("backend"), f"a backend of somebody else's, {backend!r}", f"known: {', '.join(BACKENDS)}"
        )
    if platform not in PLATFORMS:
        platforms = ", ".join(PLATFORMS[1:])
        yield _error(
            config.one("platform"), f"a platform that this tool doesn't know, {platform!r}", f"known: {platforms}"
        )
    for name, what in (("runtime", "names the library that runs the model"), ("model_repository_agents", "loads code")):
        if (field := config.one(name)) is not None:
            yield _error(field, f"{name} {what}", "remove it")
    yield from _parameters(config)
    yield from _paths(config)


def _parameters(message: Message) -> Iterator[Complaint]:
    """Those of the model and of what accelerates it, at any depth."""
    for field in message.fields:
        if not isinstance(field.value, Message):
            continue
        if field.name == "parameters":
            key, value = field.value.text("key"), _text_of(field.value)
            if key in CODE_PARAMETERS or key.upper().endswith("_PATH") or _LIBRARY.search(value):
                yield _error(field, f"parameter {key!r} names code or a path, {value[:100]!r}", "remove it")
            elif value.startswith(("/", "~")) or ".." in value.split("/"):
                yield _error(field, f"parameter {key!r} leads out of the model, {value[:100]!r}", "remove it")
        yield from _parameters(field.value)


def _text_of(parameter: Message) -> str:
    value = parameter.message("value")
    return parameter.text("value") if value is None else value.text("string_value")


def _paths(message: Message, within: str = "") -> Iterator[Complaint]:
    for field in message.fields:
        if isinstance(field.value, Message):
            yield from _paths(field.value, field.name)
        elif (
            isinstance(field.value, str) and _is_path(field, within) and field.value and escapes_directory(field.value)
        ):
            name = within if field.name == "value" else field.name
            yield _error(field, f"{name} {field.value[:100]!r} leads out of the model's directory", "name a file in it")


def _is_path(field: Field, within: str) -> bool:
    return field.name in NAMES_OF_FILES or (within == "cc_model_filenames" and field.name == "value")


def _error(field: Field | None, what: str, remedy: str) -> Complaint:
    return Complaint(severity=ERROR, line=0 if field is None else field.line, what=what, remedy=remedy)
