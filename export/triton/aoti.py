"""The PyTorch backend's platform for packages of AOTInductor: the names of its tensors, its limits and faults.

Facts are from the README of triton-inference-server/pytorch_backend, "AOT Inductor Support (Beta)", of May 2026.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from export.graph.package_notes import PackageNotes, notes_of_package
from ground.errors import BadInput

from .lint_artifact import ERROR, WARNING, LintFinding, artifact_faults, at_path, config_error, finds
from .pbtxt import Message
from .server_releases import ServerRelease
from .signature import signature_from_package

BACKEND, PLATFORM, FILE = "pytorch", "torch_aoti", "model.pt2"
FIRST_RELEASE = (26, 3)
NAMES_RELEASE = (26, 5)  # tensors may also have the names of the program's arguments from here on
LIMITS = (
    f"the platform {PLATFORM} is beta, from Triton 26.03 on: no batches of several requests and no sequences, so that "
    "each request is one call"
)
_KINDS = {"cpu": "KIND_CPU", "cuda": "KIND_GPU"}
_ORDINAL, _BY_ARGUMENT = re.compile(r"(INPUT|OUTPUT)__\d+"), re.compile(r"(ARGS|KWARGS)\[.+\]|RESULT(\[.+\])?")


def kind_of(notes: PackageNotes) -> str:
    """Return the kind of instances that run a package: on the device that it was compiled for."""
    return _KINDS[notes.device]


def release_warnings(release: ServerRelease, notes: PackageNotes) -> list[str]:
    """Return warnings about a package that may not load in a server."""
    if release.month < FIRST_RELEASE:
        return [f"{release.image} has no platform {PLATFORM}, which begins with 26.03"]
    month = release.tag.partition("-")[0]
    return [
        f"the package was compiled by torch {notes.torch} for {notes.compiled_for}, and {release.image} has a torch of "
        f"NVIDIA's: if it does not load there, compile it in the container pytorch:{month}-py3"
    ]


@finds("aotinductor")
def platform_faults(config: Message) -> Iterator[LintFinding]:
    """Yield faults of a config of the PyTorch backend by itself."""
    if (platform := config.text("platform")) != PLATFORM:
        fault = f"the backend {BACKEND} is known here with platform {PLATFORM!r} only, got {platform or 'none'!r}"
        yield config_error(config.line_of("platform"), fault, "TorchScript is code that no check reads; serve ONNX")
        return
    if (limit := config.number("max_batch_size")) > 1:
        fault = f"max_batch_size is {limit}: {LIMITS}"
        yield config_error(config.line_of("max_batch_size"), fault, "write max_batch_size: 0 and the batch in the dims")
    if (field := config.one("sequence_batching")) is not None:
        yield config_error(field.line, f"sequence_batching: {LIMITS}", "remove it")
    for side in ("input", "output"):
        for tensor in config.messages(side):
            name = tensor.text("name")
            if not (_ORDINAL.fullmatch(name) or _BY_ARGUMENT.fullmatch(name)):
                fault = f"{side} {name!r}: the server names tensors by their places, as {side.upper()}__0"
                yield config_error(tensor.line_of("name"), fault, f"write {side.upper()}__0 and so on")


@finds("aotinductor")
def lint_package(package: Path, config: Message, path: Path, release: ServerRelease | None) -> Iterator[LintFinding]:
    """Yield faults of a package, and of its config against it; the package isn't loaded."""
    try:
        notes = notes_of_package(package)
        signature = signature_from_package(notes, where=package)
    except BadInput as error:
        yield LintFinding(package, ERROR, str(error), "compile and package it again")
        return
    if all(_ORDINAL.fullmatch(tensor.text("name")) for side in ("input", "output") for tensor in config.messages(side)):
        yield from at_path(path, artifact_faults(config, signature, package.name))
    elif release is not None and release.month < NAMES_RELEASE:
        fault = f"{release.image} names tensors by their places only, as INPUT__0; other names begin with 26.05"
        yield LintFinding(path, ERROR, fault, "name them so", config.line_of("input"))
    kinds = [(group.text("kind"), group.line_of("kind")) for group in config.messages("instance_group")]
    for kind, line in kinds or [("", config.line_of("instance_group"))]:
        if kind != kind_of(notes):
            fault = f"{package.name} was compiled for {notes.device}, got kind {kind or 'none'}"
            yield LintFinding(path, ERROR, fault, f"write kind: {kind_of(notes)}", line)
    for fault in [] if release is None else release_warnings(release, notes):
        severity = ERROR if release is not None and release.month < FIRST_RELEASE else WARNING
        yield LintFinding(package, severity, fault, "serve the ONNX graph otherwise", rule="server")
