"""The roll-over of a running server to another version of a model, without a refused request.

For each loaded variant, a copy is loaded under another name, warmed up and checked on samples. Then the version is
added beside the served ones, and then served alone. When a step fails the old config is loaded again.

The server needs the load API (--model-control-mode=explicit) and room for two versions, briefly for three.
"""

import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.files import text_from_file

from .server import DATA_TYPES, ServerError, TritonServer
from .versions import ServedVersion, config_path, install_text, models_by_version, staging_folder

STAGED = "_staged"
POLL_S = 0.1
_SPECIFIC = re.compile(r"(?s)^version_policy\b.*?versions:\s*(?:\[[^\]]*\]|\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Inputs [N,...] of a model with one input, the expected answers [N,F], and the largest relative error allowed."""

    images: NDArray[Any]
    answers: NDArray[Any]
    max_relative_error: float

    def __post_init__(self) -> None:
        if self.images.dtype.name not in DATA_TYPES:
            raise BadInput(f"samples of type {self.images.dtype}, expected one of {', '.join(DATA_TYPES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RollResult:
    """Served models, `idle` ones (config changed, not loaded), `errors` on samples by model, and any `failure`."""

    served: ServedVersion
    idle: tuple[str, ...] = ()
    errors: Mapping[str, float]
    failure: str | None = None


def roll(repository: Path, name: str, version: int, server: TritonServer, samples: Samples | None = None) -> RollResult:
    """Switch the server to a version of all loaded variants, and the configs of all variants that have it.

    Raises BadInput for an unknown version, and for a server that doesn't answer or has no variant loaded.
    """
    having, unchanged = models_by_version(repository, name, version)
    server.require_live()
    try:
        loaded = [model for model in having if server.ready_versions(model)]
    except ServerError as error:
        raise BadInput(f"server {server.address}: {error}; it does not list its models") from None
    if not loaded:
        raise BadInput(
            f"server {server.address}: none of {', '.join(having)} is loaded there; leave out --server to change the "
            f"repository alone, or start the server with --load-model={having[-1]}"
        )
    for folder in (repository / model for model in loaded):  # checked first, as they would stop the roll half-way
        staged = repository / (folder.name + STAGED)
        if staged.exists():
            left = "left by a killed roll-over, or another one is running"
            raise BadInput(f"{staged}: {left}; remove it if none is running")
        _with_versions(_pinned(folder, version), [version])
    errors, rolled, failure = dict[str, float](), list[str](), None
    for model in loaded:
        try:
            errors |= _roll_model(repository / model, version, server, samples)
        except (ServerError, OSError) as error:
            failure = f"{model}: {error}; version {_served_list(server, model)} is still served"
            break
        rolled.append(model)
    idle = tuple(model for model in having if model not in loaded and failure is None)
    for model in idle:
        install_text(_pinned(repository / model, version), repository / model / "config.pbtxt")
    served = ServedVersion(version=version, models=tuple(rolled), unchanged=unchanged)
    return RollResult(served=served, idle=idle, errors=errors, failure=failure)


def _roll_model(folder: Path, version: int, server: TritonServer, samples: Samples | None) -> dict[str, float]:
    """Roll one model over and return its samples' relative error by name. Restores the old version if that fails."""
    model, before = folder.name, server.ready_versions(folder.name)
    config, pinned = folder / "config.pbtxt", _pinned(folder, version)
    with _staged(folder, version, server) as staged:
        errors = {} if samples is None else {model: _checked(server, staged, version, samples)}
    former = text_from_file(config)
    try:
        if before != (version,):
            _load(server, model, config, _with_versions(pinned, sorted({*before, version})), version)
        _load(server, model, config, pinned, version)
    except BaseException:
        install_text(former, config)
        # A load that took too long may still end; this one comes after it. The first error is the one to report.
        with suppress(ServerError):
            server.load(model)
        raise
    return errors


def _load(server: TritonServer, model: str, config: Path, text: str, version: int) -> None:
    install_text(text, config)
    server.load(model)
    _wait_until_ready(server, model, version)


def _wait_until_ready(server: TritonServer, model: str, version: int) -> None:
    until = time.monotonic() + server.timeout_s
    while not server.is_ready(model, version):
        if time.monotonic() > until:
            raise ServerError(f"version {version} was not ready within {server.timeout_s:g} s")
        time.sleep(POLL_S)


@contextmanager
def _staged(folder: Path, version: int, server: TritonServer) -> Iterator[str]:
    name = folder.name + STAGED
    target = folder.parent / name
    with staging_folder(folder.parent) as scratch:
        copy = scratch / name
        # Links and pipes would be copied from elsewhere, or without end.
        for path in sorted((folder / str(version)).rglob("*")):
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise BadInput(f"{path}: a link, pipe or device, expected only files; package the version again")
        shutil.copytree(folder / str(version), copy / str(version))
        text = re.sub(r'(?m)^name: "[^"]*"', f'name: "{name}"', _pinned(folder, version), count=1)
        install_text(text, copy / "config.pbtxt")
        copy.rename(target)
    try:
        server.load(name)
        _wait_until_ready(server, name, version)
        yield name
    finally:
        with suppress(ServerError):  # it never loaded, or the server is gone; the first error is the one to report
            server.unload(name)
        shutil.rmtree(target)


def _checked(server: TritonServer, model: str, version: int, samples: Samples) -> float:
    names = server.input_names(model, version)
    if len(names) != 1:
        raise BadInput(f"samples are of one input, {model} takes {', '.join(names)}; leave out --samples")
    rows = []
    for image in samples.images:
        outputs = server.infer(model, version, {names[0]: image[None]})
        rows.append(np.concatenate([output.ravel() for output in outputs.values()]))
    answers, expected = np.stack(rows), samples.answers.reshape(len(rows), -1)
    if answers.shape != expected.shape:
        raise ServerError(f"version {version} answers {answers.shape[1]} values to a sample, not {expected.shape[1]}")
    error = float(np.linalg.norm(answers - expected) / max(float(np.linalg.norm(expected)), 1e-30))
    if not error <= samples.max_relative_error:
        raise ServerError(
            f"version {version} answers the samples with a relative error of {error:.2e}, at most "
            f"{samples.max_relative_error:g} is expected"
        )
    return error


def _pinned(folder: Path, version: int) -> str:
    """Return the config that serves this version only."""
    return text_from_file(config_path(folder, version))


def _with_versions(text: str, versions: list[int]) -> str:
    policy = f"version_policy {{\n  specific {{\n    versions: [{', '.join(map(str, versions))}]"
    changed, count = _SPECIFIC.subn(policy, text)
    if count != 1:
        raise BadInput("the version's config names no specific version_policy; package the version again")
    return changed


def _served_list(server: TritonServer, model: str) -> str:
    try:
        return ", ".join(map(str, server.ready_versions(model))) or "none"
    except ServerError:
        return "unknown"
