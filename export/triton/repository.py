"""The writing of a Triton model repository: a model for each variant, with versions side by side."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from export.engine.record import EngineRecord, sha256_of
from export.graph.package_notes import notes_of_package
from ground.errors import BadInput
from ground.transaction import exclusive_access, install_files, roll_back_interrupted

from .aoti import LIMITS, release_warnings
from .config import EXPECTED_NAME, LABELS_NAME, ServedModel, config_text, expected_entry, read_expected, write_expected
from .server_releases import ServerRelease, onnx_warnings, plan_warnings, server_release, vulnerability_warnings
from .variants import Package, build_served_models, read_own_record
from .versions import config_path, install_text, model_names, staging_folder, versions_of

CHOOSES_BF16 = (
    "the server's OpenVINO computes in BF16 on a CPU that has it, and its backend has no key against that; where FP32 "
    "is needed there, serve with the CPU backend python or onnxruntime"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedVersion:
    models: tuple[str, ...]
    warnings: tuple[str, ...]


def write_repository(package: Package, repository: Path) -> AddedVersion:
    """Add one version of all variants, or of none after an error; older versions stay.

    Raises BadInput when artefacts contradict each other, their records or the options, and when the version exists.
    """
    release = None if package.server is None else server_release(package.server)
    roll_back_interrupted(repository)
    _refuse_existing(package, repository)
    records = tuple(map(read_own_record, package.plans))
    models = build_served_models(package, records, release)
    for variant in (*models, *(model.pending for model in models if model.pending is not None)):
        _refuse_contradictions(package, variant)
    with staging_folder(repository) as folder, exclusive_access(repository.resolve().parent):
        _refuse_existing(package, repository)  # another process may have written it meanwhile
        entries = read_expected(repository / EXPECTED_NAME)
        moves = {EXPECTED_NAME: folder / EXPECTED_NAME}
        for model in models:
            entries.setdefault(model.name, {})[str(package.version)] = expected_entry(
                model, package.version, package.proof
            )
            moves |= _stage_version(package, model, repository, folder / model.name)
        write_expected(folder / EXPECTED_NAME, entries)
        _install(repository, moves)
    warnings = dict.fromkeys(_warnings(package, models, records, release, repository))
    return AddedVersion(models=tuple(model.name for model in models), warnings=tuple(warnings))


def _refuse_existing(package: Package, repository: Path) -> None:
    if repository.exists() and not repository.is_dir():
        raise BadInput(f"{repository}: a file is in the way; name a directory")
    for name in model_names(repository, package.name):
        have = versions_of(repository / name)
        if package.version in have:
            raise BadInput(
                f"{repository / name}: version {package.version} is already there (of {', '.join(map(str, have))}); "
                f"choose another, such as --model-version {max(have) + 1}, or remove it"
            )


def _refuse_contradictions(package: Package, variant: ServedModel) -> None:
    sizes = {"preferred batch": package.serving.preferred_batches, "CUDA graph of batch": variant.graph_batches}
    for what, batches in sizes.items():
        beyond = [size for size in batches if size > variant.max_batch]
        if beyond and variant.max_batch > 0:
            raise BadInput(
                f"{variant.name}: {what} {beyond[0]} is beyond the largest batch {variant.max_batch}; "
                "measure within it, raise max_batch, or build the plan for a larger batch"
            )
    roles = variant.signature.output_roles
    classes = [tensor.shape[-1] for tensor in variant.signature.outputs if roles[tensor.name] == "logits"]
    if package.labels and not classes:
        outputs = ", ".join(f"{name} ({role})" for name, role in roles.items())
        raise BadInput(f"{variant.name}: labels name classes, and its outputs are {outputs}; leave them out")
    if package.labels and any(count != len(package.labels) for count in classes):
        raise BadInput(f"{variant.name}: {len(package.labels)} labels for {classes[0]} outputs; give one per class")


def _install(repository: Path, moves: Mapping[str, Path]) -> None:
    is_new = not repository.exists()
    try:
        repository.mkdir(exist_ok=True)
        install_files(repository, moves)
    except BaseException:
        if is_new:
            with suppress(OSError):
                repository.rmdir()
        raise


def _stage_version(package: Package, model: ServedModel, repository: Path, staging: Path) -> dict[str, Path]:
    version, name = str(package.version), model.name
    folder = staging / version
    folder.mkdir(parents=True)
    for file, content in model.files.items():
        if isinstance(content, Path):
            shutil.copyfile(content, folder / file)
        else:
            (folder / file).write_text(content)
    if package.labels:
        (folder / LABELS_NAME).write_text("".join(f"{label}\n" for label in package.labels))
    labelled, target = bool(package.labels), repository / name
    text = config_text(model, package.serving, package.version, labelled=labelled)
    pinned = config_text(model, replace(package.serving, policy="specific"), package.version, labelled=labelled)
    install_text(pinned, config_path(staging, package.version))
    install_text(text, staging / "config.pbtxt")
    if not target.exists():
        return {name: staging}
    parts = (version, str(config_path(Path(), package.version)), "config.pbtxt")
    return {f"{name}/{part}": staging / part for part in parts}


def _warnings(
    package: Package,
    variants: Sequence[ServedModel],
    records: tuple[EngineRecord, ...],
    release: ServerRelease | None,
    repository: Path,
) -> Iterator[str]:
    for name in (each.name for each in variants):
        newest = max(versions_of(repository / name))
        if package.serving.policy == "latest" and newest > package.version:
            yield f"{name}: the server takes version {newest}, the newest, and not {package.version}"
    if records and package.onnx is not None:
        digest = sha256_of(package.onnx.read_bytes())
        if any(record.onnx_sha256 != digest for record in records):
            other = f"the plan was built from another ONNX file than {package.onnx}"
            yield f"{package.name}: {other}, which the build script reads"
    for variant in variants:
        if (fixed := variant.signature.fixed_batch) is not None:
            only = f"takes batches of {fixed} only, so it is served without batching"
            yield f"{variant.name}: {only}; export with an open batch"
        if variant.backend == "openvino" and not package.serving.cpu_bf16:
            yield f"{variant.name}: {CHOOSES_BF16}"
        if variant.backend == "pytorch":
            yield f"{variant.name}: {LIMITS}"
        if (smallest := variant.signature.smallest_batch) > 1:
            yield f"{variant.name}: requests of fewer than {smallest} fail; build the profile from 1 on"
    if release is None:
        return
    yield from vulnerability_warnings(release)
    for record in records:
        compatible = record.options.get("version_compatible") is True
        yield from plan_warnings(release, record.library_version, version_compatible=compatible)
    if package.aoti is not None:
        for text in release_warnings(release, notes_of_package(package.aoti)):
            yield f"{package.name}_aoti: {text}"
    for variant in variants:
        if variant.backend == "onnxruntime":
            notes = onnx_warnings(release, opset=variant.signature.opset, ir=variant.signature.ir)
            yield from (f"{variant.name}: {text}" for text in notes)
        elif variant.backend == "python":
            lacks = f"{release.image} has no ONNX Runtime in its Python {release.python}"
            yield f"{variant.name}: {lacks}; pip install it there"
