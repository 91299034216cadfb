"""Records beside results: manifest.json of a directory's files, and effort.json of the time and memory of a step.

A manifest lists files, the commands that made them and the versions. The effort of a step stands in its directory, or
in X.effort.json beside its file X; it is never digested, since a step that runs again makes the same bytes in another
time. Imports no torch.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from corp_deploy.machine import versions
from ground.effort import NAME, Effort, Stopwatch, is_effort
from ground.files import sha256_of_file, write_json
from ground.gpu import gpu_name
from ground.records import record_from_file
from perf.runners.protocol import build_stopwatch
from perf.timing.watch import cpu_name

from .model_config import ModelConfig, load_model_config

MANIFEST, MANIFEST_KIND = "manifest.json", "corp-deploy/manifest"
AGAIN = "make the directory again with `corp-deploy release`, `package` or `demo`"


class ManifestEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A file's digest, and the command that made it, empty where it is unknown."""

    sha256: str
    made_by: str


class ReleaseName(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a release, and the version if its recipe gives one."""

    name: str
    version: str | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The entries of a manifest that are read; only a release has the entry `release`."""

    versions: dict[str, Any]
    files: dict[str, ManifestEntry]
    release: ReleaseName | None = None


def load_manifest(path: Path) -> Manifest:
    """Read a manifest. Raises BadInput, naming the entry, for an invalid one."""
    return record_from_file(path, Manifest, kind=MANIFEST_KIND, remedy=AGAIN)


def entry_of(path: Path, made_by: str = "") -> dict[str, Any]:
    """Return the entry of a file: its digest and size, and the command that made it."""
    return {"sha256": sha256_of_file(path), "size_bytes": path.stat().st_size, "made_by": made_by}


def entries_of_model(reduced: ModelConfig) -> dict[str, Any]:
    """Return the manifest's entries `tokens` for a model that merges tokens and `outputs` for named outputs."""
    tokens = {} if reduced.merging is None else {"tokens": reduced.merging.merging.describe()}
    outputs = {} if reduced.outputs is None else {"outputs": list(reduced.outputs)}
    return {**tokens, **outputs}


def input_of_graphs(directory: Path) -> dict[str, Any]:
    """Return the entry `input` of reduced graphs of pixels: type, shape and where they are normalised; {} for none."""
    from .graph_facts import facts_of_onnx

    facts = [facts_of_onnx(path) for path in sorted((directory / "reduced").glob("*.onnx"))]
    places = sorted({each.normalised for each in facts if each.normalised is not None})
    if not places:
        return {}
    port = next(each.inputs[0] for each in facts if each.normalised is not None)
    input_record = {"dtype": port.dtype, "shape": list(port.shape), "normalised": ", ".join(places)}
    return {"input": input_record | {"before": "preprocessing without mean and std"}}


def write_manifest(directory: Path, made_by: Mapping[str, str], *, command: str) -> None:
    """Write manifest.json with the digest, size and command of every file below the directory.

    The manifest itself and records of effort are left out. Entries of the models are the preprocessing, the polish, the
    token merging, the named outputs and the input of graphs. `made_by` maps relative names to commands.
    """
    files = sorted(
        path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST and not is_effort(path)
    )
    named = {path.relative_to(directory).as_posix(): path for path in files}
    reduced = load_model_config(directory / "reduced")
    polish = reduced.lineage.get("polish")
    manifest = {
        "kind": MANIFEST_KIND,
        "version": 1,
        "command": command,
        "versions": versions(),
        "preprocessing": load_model_config(directory / "dense").input.preprocessing,
        **({} if polish is None else {"polish": polish}),
        **entries_of_model(reduced),
        **input_of_graphs(directory),
        "files": {name: entry_of(path, made_by.get(name, "")) for name, path in named.items()},
    }
    write_json(directory / MANIFEST, manifest)


KIND: Final = "corp-deploy/effort"
FILES = "read and write"
REMEDY = "delete it, it holds nothing but what a step took, or run the step again"
STEPS = ("calibrate", "reduce", "export", "build")
Step = Literal["calibrate", "reduce", "export", "build"]


class EffortRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The time and memory of a step's last run, by its parts; the part FILES is the rest of the time.

    `machine` is the processor's name, `gpu` that of the GPU whose memory was measured. A `resumed` step continued an
    interrupted run, whose time is not included.
    """

    kind: Literal["corp-deploy/effort"] = KIND
    version: Literal[1] = 1
    step: Step
    machine: str
    gpu: str | None = None
    versions: dict[str, str]
    resumed: bool = False
    parts: dict[str, Effort]


Efforts = Mapping[tuple[Step, str], EffortRecord | None]
"""The records by step and product, None for a step without a record."""


def path_beside(output: Path) -> Path:
    """Return the path of the effort record of a file or directory."""
    return output / NAME if output.is_dir() else output.with_name(f"{output.name}.{NAME}")


@contextmanager
def timed_on(device: str = "cpu", watch_of: Callable[[str], Stopwatch] = build_stopwatch) -> Iterator[Stopwatch]:
    """Yield a stopwatch for parts of the body; time that no part measures counts as FILES."""
    watch = watch_of(device)
    with watch.measure(FILES):
        yield watch


def write_effort(path: Path, step: Step, watch: Stopwatch, *, device: str = "cpu", resumed: bool = False) -> None:
    """Write the effort of a step in this process, in place of an older record."""
    record = EffortRecord(
        step=step,
        machine=cpu_name(),
        gpu=gpu_name(device),
        versions=versions(),
        resumed=resumed,
        parts=watch.efforts,
    )
    write_json(path, msgspec.to_builtins(record))


def load_effort(path: Path) -> EffortRecord:
    """Read an effort record. Raises BadInput for a damaged one."""
    return record_from_file(path, EffortRecord, kind=KIND, remedy=REMEDY)


def efforts_below(directory: Path) -> Efforts:
    """Return the effort records in a directory and its direct folders. Raises BadInput for a damaged one."""
    shown = (path for path in sorted(directory.iterdir()) if path.is_dir() and not path.name.startswith("."))
    paths = [path for folder in (directory, *shown) for path in sorted(folder.iterdir()) if is_effort(path)]
    records = [(load_effort(path), _artefact(path, directory)) for path in paths]
    return {(record.step, product): record for step in STEPS for record, product in records if record.step == step}


def _artefact(path: Path, directory: Path) -> str:
    beside = path.parent if path.name == NAME else path.with_name(path.name.removesuffix(f".{NAME}"))
    return beside.relative_to(directory).as_posix()
