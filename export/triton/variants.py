"""The served models of a package: their artefacts and the files of their version directories."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from export.engine.options import BatchProfile
from export.engine.record import EngineRecord, record_of_plan, record_path, sha256_of
from export.graph.package_notes import notes_of_package
from ground.errors import BadInput
from ground.text import printable

from .aoti import BACKEND, FILE, kind_of
from .config import DEFAULT_MAX_BATCH, Expected, ServedModel, Serving, config_text
from .server_releases import PENDING_NAME, SCRIPT_NAME, ServerRelease, build_script, server_tags
from .signature import Signature, signature_from_onnx, signature_from_package, signature_from_record
from .versions import require_name


def require_labels(labels: Sequence[str], *, where: str) -> None:
    if len(set(labels)) < len(labels) or any(not text.strip() or "\n" in text for text in labels):
        raise BadInput(f"{where}: every label must be one line, not empty and unique")
    if unprintable := [text for text in labels if printable(text) != text]:
        raise BadInput(f"{where}: the label {unprintable[0][:100]!r} has unprintable characters; remove them")


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One version of a model for a repository; at least one artefact is needed.

    `plans` are one for each compute capability, with records beside them, `onnx` is their graph, served on the GPU, and
    `cpu_onnx` the graph for the CPU, and `aoti` a package of AOTInductor. `expected` goes by variant: plan, onnx, cpu,
    aoti. `profiles` are for the build script where there is no plan, `proof` holds verdicts by record.
    """

    name: str
    version: int = 1
    plans: tuple[Path, ...] = ()
    onnx: Path | None = None
    cpu_onnx: Path | None = None
    aoti: Path | None = None
    labels: tuple[str, ...] = ()
    serving: Serving = field(default_factory=Serving)
    expected: Mapping[str, Expected] = field(default_factory=dict)
    profiles: tuple[BatchProfile, ...] = ()
    server: str | None = None
    proof: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_name(self.name)
        if self.profiles and (self.plans or self.onnx is None):
            raise BadInput(
                f"{self.name}: profiles are for the script that builds a plan from an ONNX file; "
                f"{'leave them out, the plan has its own' if self.plans else 'give that file, or leave them out'}"
            )
        require_labels(self.labels, where=self.name)


BACKEND_MODEL = Path(__file__).with_name("python_backend_model.py")


def read_own_record(plan: Path) -> EngineRecord:
    path = record_path(plan)
    if not plan.is_file() or not path.is_file():
        raise BadInput(f"{plan}: the plan and its record {path.name} are both needed; build it again")
    record = record_of_plan(plan)
    if record.backend != "tensorrt":
        raise BadInput(
            f"{plan}: it was built for {record.backend}, and Triton loads plans of tensorrt only; "
            "leave it out and let the build script make the plan in the server's container"
        )
    if record.plan_sha256 != sha256_of(plan.read_bytes()):
        raise BadInput(f"{plan}: its bytes are not those of {path.name}; build it again")
    return record


def _plan_model(package: Package, records: tuple[EngineRecord, ...]) -> ServedModel:
    signature = signature_from_record(records[0])
    for plan, record in zip(package.plans, records, strict=True):
        if signature_from_record(record) != signature:
            raise BadInput(f"{plan}: its inputs, outputs or profiles differ from those of {package.plans[0]}")
    files: dict[str, Path | str] = {}
    names = _cc_filenames(package.plans, records)
    for plan, name in zip(package.plans, names.values() or ["model.plan"], strict=True):
        files |= {name: plan, record_path(Path(name)).name: record_path(plan)}
    return replace(_plan_variant(package, signature, names), files=files, expected=package.expected.get("plan"))


def _plan_variant(package: Package, signature: Signature, names: Mapping[str, str]) -> ServedModel:
    return ServedModel(
        name=package.name,
        backend="tensorrt",
        kind="KIND_GPU",
        signature=signature,
        max_batch=0 if signature.fixed_batch is not None else signature.largest_batch or 1,
        cc_filenames=names,
        graph_batches=tuple(sorted(package.serving.graph_batches)),
    )


def _cc_filenames(plans: tuple[Path, ...], records: tuple[EngineRecord, ...]) -> dict[str, str]:
    names: dict[str, str] = {}
    for plan, record in zip(plans, records, strict=True) if len(records) > 1 else ():
        target = record.targets[0] if len(record.targets) == 1 else ""
        if not re.fullmatch(r"\d{2,3}", target):
            raise BadInput(
                f"{plan}: its record names the targets {record.targets}; among several plans each needs one SM"
            )
        key = f"{target[:-1]}.{target[-1]}"
        if key in names:
            raise BadInput(f"{plan}: another plan is for SM {target} too; give one plan per compute capability")
        names[key] = f"model.sm{target}.plan"
    return names


def _onnx_model(
    package: Package, graph: Path, records: tuple[EngineRecord, ...], release: ServerRelease | None, limit: int | None
) -> ServedModel:
    variant = _graph_variant(package, graph, "onnx", limit)
    profiles = _profiles_to_build(package, graph, variant.signature, records)
    pending = None if records else _plan_variant(package, replace(variant.signature, profiles=profiles), {})
    script = build_script(
        name=package.name,
        version=package.version,
        inputs=variant.signature.inputs,
        profiles=profiles,
        onnx_sha256=sha256_of(graph.read_bytes()),
        cc_filenames=_cc_filenames(package.plans, records),
        image_tag=f"{server_tags()[0]}-py3" if release is None else release.tag,
        pending=pending is not None,
    )
    files: dict[str, Path | str] = {"model.onnx": graph, SCRIPT_NAME: script}
    if pending is not None:
        files[PENDING_NAME] = config_text(pending, package.serving, package.version, labelled=bool(package.labels))
    return replace(variant, files=files, expected=package.expected.get("onnx"), pending=pending)


def _graph_variant(package: Package, path: Path, suffix: str, limit: int | None) -> ServedModel:
    signature = signature_from_onnx(path)
    if any(size == -1 for tensor in signature.inputs for size in tensor.dims(batched=True)):
        raise BadInput(f"{path}: sizes behind the batch are open ({signature.inputs}); export it with fixed ones")
    on_cpu = suffix == "cpu"
    backend = package.serving.cpu_backend if on_cpu else "onnxruntime"
    batches = signature.fixed_batch is None and backend != "openvino"
    return ServedModel(
        name=f"{package.name}_{suffix}",
        backend=backend,
        kind="KIND_CPU" if on_cpu else "KIND_GPU",
        signature=signature,
        max_batch=limit or DEFAULT_MAX_BATCH if batches else 0,
        cc_filenames={},
        threads=package.serving.cpu_threads if on_cpu else None,
    )


def _profiles_to_build(
    package: Package, graph: Path, signature: Signature, records: tuple[EngineRecord, ...]
) -> tuple[BatchProfile, ...]:
    if signature.fixed_batch is not None:
        if package.profiles:
            raise BadInput(
                f"{graph}: its batch is fixed at {signature.fixed_batch}, asked for profiles "
                f"{', '.join(map(str, package.profiles))}; leave them out or export with an open batch"
            )
        return ()
    if records:
        return signature_from_record(records[0]).profiles
    serving = package.serving
    largest = serving.max_batch or max((DEFAULT_MAX_BATCH, *serving.preferred_batches, *serving.graph_batches))
    tuned = min(serving.preferred_batches, default=largest)
    return package.profiles or (BatchProfile(smallest=1, tuned=tuned, largest=largest),)


def _aoti_model(package: Package, path: Path) -> ServedModel:
    notes = notes_of_package(path)
    return ServedModel(
        name=f"{package.name}_aoti",
        backend=BACKEND,
        kind=kind_of(notes),
        signature=signature_from_package(notes, where=path),
        max_batch=0,
        cc_filenames={},
        files={FILE: path},
        expected=package.expected.get("aoti"),
    )


def build_served_models(
    package: Package, records: tuple[EngineRecord, ...], release: ServerRelease | None
) -> list[ServedModel]:
    models = [_plan_model(package, records)] if records else []
    limit = package.serving.max_batch or (signature_from_record(records[0]).largest_batch if records else None)
    if package.onnx is not None:
        models.append(_onnx_model(package, package.onnx, records, release, limit))
    if package.cpu_onnx is not None:
        code = {"model.py": BACKEND_MODEL} if package.serving.cpu_backend == "python" else {}
        variant = _graph_variant(package, package.cpu_onnx, "cpu", limit)
        files = {"model.onnx": package.cpu_onnx, **code}
        models.append(replace(variant, files=files, expected=package.expected.get("cpu")))
    if package.aoti is not None:
        models.append(_aoti_model(package, package.aoti))
    return models
