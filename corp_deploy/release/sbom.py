"""The bill of materials and the provenance of a release. Neither holds a time: the same inputs give the same bytes.

The bill, in CycloneDX 1.6, lists the models with their measurements, the data, and the environment. The provenance is
an in-toto Statement v1 with a SLSA v1 provenance predicate (in-toto.io/Statement/v1, slsa.dev/provenance/v1); its
invocation id is the digest of the build's inputs.
"""

import json
import tomllib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from corp_deploy import __version__
from corp_deploy.machine import versions
from corp_deploy.store.model_config import ModelConfig, load_model_config
from ground.files import sha256_of_file, sha256_of_text, text_from_file
from ground.installed import InstalledPackage, installed_packages, normalised_licence
from ground.places import Place, Url
from perf.gate.verdicts import load_gate
from perf.parity.parity import Parity, load_parity
from perf.record.runs import load_bench
from perf.stats.summary import summarise

from .digests import read_stamp
from .incremental import STATE, Stage
from .names import GATE, MODELS, PARITY, RECIPE, SUBJECTS, bench_name, graphs_of, load_moments_summary
from .recipe import Recipe

SCHEMA, VERSION = "http://cyclonedx.org/schema/bom-1.6.schema.json", "1.6"
OWN_REFERENCE = "LicenseRef-"
_SPACE = uuid.UUID("6f0c1c5e-6d4f-5e1b-9f57-1b2a5c0a9d11")
NAME = "corp-deploy"
TOOL = {"type": "application", "bom-ref": NAME, "name": NAME, "version": __version__}
MODEL = "model:{}"
CALIBRATION, HELD_OUT = "data:calibration", "data:held-out"


def licences(expression: str) -> list[dict[str, Any]]:
    """Return CycloneDX's list `licenses` with the SPDX expression, or a name unknown to SPDX; [] for no expression."""
    if not expression:
        return []
    if expression.startswith(OWN_REFERENCE) and " " not in expression:
        return [{"license": {"name": expression.removeprefix(OWN_REFERENCE)}}]
    known = normalised_licence(expression)
    return [{"license": {"name": expression}} if known is None else {"expression": known}]


def _reference(package: InstalledPackage) -> str:
    return f"pkg:pypi/{package.name}@{package.version}"


def _hashes(digest: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": digest}]


def _licensed(expression: str | None) -> dict[str, Any]:
    return {"licenses": licences(expression)} if expression else {}


def _data(reference: str, name: str, digest: str, count: int, licence: str | None) -> dict[str, Any]:
    counted = [{"name": "images", "value": str(count)}]
    return {
        "type": "data",
        "bom-ref": reference,
        "name": name,
        "hashes": _hashes(digest),
        **_licensed(licence),
        "data": [{"type": "dataset", "name": name, "contents": {"properties": counted}}],
    }


def _interval(low: float, high: float) -> dict[str, Any]:
    return {"confidenceInterval": {"lowerBound": f"{low:.6g}", "upperBound": f"{high:.6g}"}}


def _agreement(parity: Parity) -> Iterator[dict[str, Any]]:
    for link in parity.links:
        where = f"{link.name}, held-out images: {link.status}"
        yield {"type": "relative error", "value": f"{link.measures.relative_error:.6g}", "slice": where}
        if link.measures.agreement is not None:
            name = "top-1 agreement" if link.role == "logits" else "agreement"
            yield {"type": name, "value": f"{link.measures.agreement:.6g}", "slice": where}
    for row in parity.accuracy:
        interval = _interval(row.low, row.high)
        yield {"type": "accuracy", "value": f"{row.accuracy:.6g}", "slice": f"{row.model}, held-out images", **interval}
    for own in parity.metrics:
        yield {"type": own.name, "value": f"{own.value:.6g}", "slice": f"{own.model}, held-out images"}


def _speed(root: Path, recipe: Recipe) -> Iterator[dict[str, Any]]:
    for target in recipe.targets:
        for row in summarise(load_bench(root / bench_name(recipe, target))).rows:
            if (gain := row.speedup) is not None:
                where = f"{target.name} {target.precision}, batch {row.batch}"
                value, interval = f"{gain.value:.6g}", _interval(gain.low, gain.high) if gain.is_bounded else {}
                yield {"type": "speed-up", "value": value, "slice": where, **interval}


def _card(root: Path, recipe: Recipe, config: ModelConfig, parity: Parity) -> dict[str, Any]:
    shape = "x".join(map(str, config.input.shape)) or "by the preprocessing"
    metrics = [*_agreement(parity), *_speed(root, recipe)]
    metrics.append({"type": "release gate", "value": load_gate(root / GATE).verdict})
    limit = f"Agreement was measured on {parity.images.count} images; on images of another kind it may be lower."
    return {
        "modelParameters": {
            "task": "image classification" if parity.compared == "logits" else f"images to {parity.compared}",
            "architectureFamily": config.family,
            "modelArchitecture": config.architecture_line,
            "datasets": [{"ref": CALIBRATION}, {"ref": HELD_OUT}],
            "inputs": [{"format": f"{recipe.export.graph_input} images, {shape}"}],
            "outputs": [{"format": parity.compared}],
        },
        "quantitativeAnalysis": {"performanceMetrics": metrics},
        "considerations": {"technicalLimitations": [limit]},
    }


def _model(root: Path, recipe: Recipe, subject: str, config: ModelConfig) -> dict[str, Any]:
    version = {} if recipe.release.version is None else {"version": recipe.release.version}
    return {
        "type": "machine-learning-model",
        "bom-ref": MODEL.format(subject),
        "name": f"{recipe.name} ({subject})",
        **version,
        "hashes": _hashes(config.weights_sha256),
        **_licensed(recipe.licences.model),
        "components": [
            {"type": "file", "bom-ref": f"file:{name}", "name": name, "hashes": _hashes(sha256_of_file(root / name))}
            for name in (*MODELS[subject], *graphs_of(recipe, subject))
        ],
    }


def _component(package: InstalledPackage) -> dict[str, Any]:
    reference = _reference(package)
    named = {"type": "library", "bom-ref": reference, "name": package.name, "version": package.version}
    component = {**named, **_licensed(package.licence), "purl": reference}
    if package.record_sha256 is not None:  # the digest of a wheel isn't recorded when it is installed
        component["components"] = [{"type": "file", "name": "RECORD", "hashes": _hashes(package.record_sha256)}]
    return component


def _sbom(
    subject: Mapping[str, Any],
    parts: Sequence[Mapping[str, Any]],
    packages: Sequence[InstalledPackage],
    needs: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """Return the bill of materials of a subject, with a serial number computed from the content.

    The subject consists of `parts` and packages; `needs` has the references that a part depends on, by its reference.
    """
    by_name = {each.name: _reference(each) for each in packages if each.name != NAME}
    required = {name for each in packages if each.name == NAME for name in each.requires}
    direct = {NAME: [reference for name, reference in by_name.items() if name in required]}
    beside = [each for each in packages if each.name != NAME]
    others = {by_name[each.name]: [by_name[name] for name in each.requires if name in by_name] for each in beside}
    content = {
        "metadata": {"tools": {"components": [{**TOOL, "bom-ref": "tool"}]}, "component": subject},
        "components": [*parts, *map(_component, beside)],
        "dependencies": [{"ref": key, "dependsOn": on} for key, on in {**needs, **direct, **others}.items()],
    }
    serial = uuid.uuid5(_SPACE, json.dumps(content, sort_keys=True))
    head = {"$schema": SCHEMA, "bomFormat": "CycloneDX", "specVersion": VERSION, "serialNumber": f"urn:uuid:{serial}"}
    return {**head, "version": 1, **content}


def bill_of_environment(packages: Sequence[InstalledPackage]) -> dict[str, Any]:
    """Return the bill of materials of corp-deploy, with every installed package."""
    return _sbom({**TOOL, "licenses": licences("Apache-2.0")}, (), packages, {})


def bill_of_release(root: Path, recipe: Recipe) -> dict[str, Any]:
    """Return the bill of materials of a release's reduced model: the dense model, the images and the environment."""
    configs = {subject: load_model_config(root / subject) for subject in SUBJECTS}
    parity, reduced = load_parity(root / PARITY), configs["reduced"]
    dense, subject = (_model(root, recipe, each, configs[each]) for each in SUBJECTS)
    images, own, fitted = parity.images, recipe.licences, load_moments_summary(root).images
    proof_licence = own.calibration if recipe.proves_on_calibration else own.held_out
    calibration = _data(CALIBRATION, "calibration images", reduced.lineage["images"], fitted, own.calibration)
    held_out = _data(HELD_OUT, "held-out images", images.digest, images.count, proof_licence)
    parts = [dense, calibration, held_out, TOOL]
    needs = {MODEL.format("reduced"): [MODEL.format("dense"), CALIBRATION, HELD_OUT, NAME]}
    return _sbom(subject | {"modelCard": _card(root, recipe, reduced, parity)}, parts, installed_packages(), needs)


STATEMENT, PREDICATE = "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:corp-deploy:release:1"
_OF_FOLDER = "a folder or shards: sha256 over the lines 'sha256 name' of all its files, sorted"
_OF_URL = "a URL: sha256 over the names, sizes, and ETags, checksums or times of all its files, sorted"


def _describe_digest(place: Place) -> dict[str, Any]:
    if isinstance(place, Path) and place.is_file():
        return {}
    return {"annotations": {"digest": _OF_URL if isinstance(place, Url) else _OF_FOLDER}}


def _read_outside(root: Path, stages: Sequence[Stage]) -> dict[str, tuple[Place, str]]:
    """Return the path, and the digest when a stage read it, of each input outside the release by label."""
    read: dict[str, tuple[Place, str]] = {}
    for stage in stages:
        stamp = read_stamp(root / STATE, stage.name)
        for label, path in stage.outside.items():
            if stamp is not None and label in stamp.inputs:
                read.setdefault(label, (path, stamp.inputs[label]))
    return read


def _named(name: str, sha256: str) -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": sha256}}


def _definition(root: Path, recipe: Recipe, stages: Sequence[Stage]) -> dict[str, Any]:
    return {
        "buildType": BUILD_TYPE,
        "externalParameters": {
            "release": {"name": recipe.name, "version": recipe.release.version},
            "recipe": tomllib.loads(text_from_file(root / RECIPE)),
        },
        "internalParameters": {"commands": [stage.command for stage in stages]},
        "resolvedDependencies": [
            _named(label, digest) | _describe_digest(path)
            for label, (path, digest) in sorted(_read_outside(root, stages).items())
        ],
    }


def provenance(root: Path, recipe: Recipe, stages: Sequence[Stage], digests: Mapping[str, str]) -> dict[str, Any]:
    """Return the in-toto statement on how a release was made; `digests` are those of its files by name."""
    definition = _definition(root, recipe, stages)
    measured = sorted({*(path.name for path in root.glob("bench*.json")), PARITY, GATE})
    details = {
        "builder": {"id": f"pkg:generic/corp-deploy@{__version__}", "version": versions()},
        "metadata": {"invocationId": sha256_of_text(json.dumps(definition, sort_keys=True))},
        "byproducts": [_named(name, sha256_of_file(root / name)) for name in measured],
    }
    return {
        "_type": STATEMENT,
        "subject": [_named(name, digest) for name, digest in sorted(digests.items())],
        "predicateType": PREDICATE,
        "predicate": {"buildDefinition": definition, "runDetails": details},
    }
