"""Packages for Triton from a directory of results: the files to serve, their measured figures, and the signature.

A model repository is signed as a whole: every model and version in it, under one name and version.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from corp_deploy.invocation.engine import ServingOptions
from corp_deploy.machine import versions
from corp_deploy.store.class_names import class_names_of_lineage
from corp_deploy.store.hub_snapshot import is_ours
from corp_deploy.store.manifest import MANIFEST_KIND, entry_of
from corp_deploy.store.model_config import CONFIG
from export.engine.record import record_of_plan
from export.graph.package_notes import notes_of_package
from export.triton.aoti import FILE
from export.triton.config import DEFAULT_MAX_BATCH, EXPECTED_NAME, Agreement, Expected, Latency, Serving
from export.triton.lint import lint_repository
from export.triton.lint_artifact import ERROR
from export.triton.signature import Signature, signature_from_onnx, signature_from_package
from export.triton.variants import Package
from ground.errors import BadInput
from ground.files import text_from_file, write_json
from ground.records import record_from_file
from perf.parity.logits import LogitMeasures
from perf.parity.parity import load_parity
from perf.record.runs import Bench, load_bench
from perf.stats.summary import summarise

from .names import BENCH, MANIFEST, PARITY, SIGNATURE, graph_name
from .proven import ProofVerdicts
from .signature import entries_below, unsign
from .signer import Signer, sign


def choose_served_file(directory: Path, target: str, quantised: Path) -> tuple[Path, str | None]:
    """Return `quantised` and None or, if it isn't faster, the reduced model in float precision and a note.

    The record gain.TARGET.json tells which is faster; without it the quantised file is served.
    """
    path = directory / f"gain.{target}.json"
    bench = load_bench(path) if path.is_file() else None
    if bench is None or is_faster(bench):
        return quantised, None
    graph = directory / "reduced" / str(bench.subjects[0].describe["model"])
    rival = min((directory / "rivals").glob(f"model.{target}.*.plan"), default=graph)
    return rival, (
        f"{quantised.name} is left out: {path.name} doesn't show it to be faster than {rival.name} at every batch, "
        "which is served in its place"
    )


def is_faster(bench: Bench) -> bool:
    """Return True if the interval of the speed-up lies above 1 at every batch size of a record."""
    gains = [row.speedup for row in summarise(bench).rows]
    return bool(gains) and all(gain is not None and gain.low > 1.0 for gain in gains)


def quantised_graph(directory: Path, target: str) -> Path | None:
    path = directory / f"gain.{target}.json"
    if not path.is_file():
        return None
    return directory / "reduced" / str(load_bench(path).subjects[1].describe["model"])


def _plans(directory: Path) -> tuple[tuple[Path, ...], list[str], set[str]]:
    """Return the plans to serve, notes on those that are not served, and the names of replaced quantised plans.

    Plans of TensorRT-RTX can't be served; a quantised plan that isn't faster is replaced by one in float precision.
    """
    plans, notes, left_out = list[Path](), list[str](), set[str]()
    for path in sorted(directory.rglob("*.plan")):
        backend = record_of_plan(path).backend
        if backend != "tensorrt":
            reason = f"the server's backend loads TensorRT plans, this one was built for {backend}"
            notes.append(f"{path.name} is left out: {reason}")
            continue
        served, note = choose_served_file(directory.parent, backend, path)
        plans.append(served)
        if note is not None:
            notes.append(note)
            left_out.add(path.name)
    return tuple(plans), notes, left_out


def _latencies(bench: Bench) -> tuple[Latency, ...]:
    summary = summarise(bench)
    medians = [(row.batch, row.sides[summary.candidate].p50_ms) for row in summary.rows]
    return tuple(
        Latency(batch=batch, p50_ms=p50.value, low_ms=max(p50.low, 0.0), high_ms=p50.high)
        for batch, p50 in medians
        if p50 is not None and p50.is_bounded
    )


def _agreement(directory: Path) -> Agreement | None:
    path = directory / PARITY
    if not path.is_file():
        return None
    links = load_parity(path).links
    errors = next((link for link in links if link.kind == "whole"), links[-1]).measures
    bounds = errors.agreement_bounds
    if not isinstance(errors, LogitMeasures) or errors.top1_agreement is None or bounds is None:
        return None  # the first output has no classes, or there are too few images for an interval
    return Agreement(share=errors.top1_agreement, images=errors.images, low=bounds[0], high=bounds[1])


MOST_LABELS_BYTES = 2**26


def read_class_names(path: Path) -> tuple[str, ...]:
    try:
        text = text_from_file(path, most_bytes=MOST_LABELS_BYTES)
    except OSError as error:
        raise BadInput(f"{path}: can't be read as a list of labels, one a line ({error})") from None
    lines = text.splitlines()
    labels = tuple(line.strip() for line in lines if line.strip())
    if not labels:
        raise BadInput(f"{path}: holds no labels, expected one a line; leave it out to serve without them")
    return labels


def _own_class_names(directory: Path, given: Signature) -> tuple[str, ...]:
    """Return the class names of the model's configuration if a graph has as many logits, else an empty tuple."""
    if not (directory / CONFIG).is_file():
        return ()
    config = record_from_file(directory / CONFIG, dict[str, Any])
    lineage = config.get("lineage")
    names = class_names_of_lineage(lineage) if is_ours(config) and isinstance(lineage, dict) else ()
    counts = [port.shape[-1] for port in given.outputs if port.shape and given.output_roles[port.name] == "logits"]
    return names if counts and all(count == len(names) for count in counts) else ()


def _expected(bench: Bench, agreement: Agreement | None, *, has_plans: bool) -> dict[str, Expected]:
    described, here = bench.subjects[1].describe, bench.environment
    variant = "cpu" if described.get("device") == "cpu" else "plan" if has_plans else "onnx"
    variant = "aoti" if described.get("backend") == "aotinductor" else variant
    where = f"{here.get('gpu') or here.get('cpu')}, {described.get('backend')}"
    return {variant: Expected(measured_on=where, latencies=_latencies(bench), top1_agreement=agreement)}


def _in_openvino(directory: Path, fp32: Path, serving: Serving) -> tuple[Path, Serving, list[str]]:
    """Return the graph that was measured in OpenVINO, the options with its precision, and notes.

    If no graph was measured, or in a precision that the server can't be asked for, return the FP32 graph.
    """
    for path in (directory / BENCH, directory / "bench.openvino.json"):
        description = load_bench(path).subjects[1].describe if path.is_file() else {}
        if description.get("backend") != "openvino":
            continue
        graph = directory / "reduced" / str(description["model"])
        if description["computed_in"] == "bf16":
            return graph, replace(serving, cpu_bf16=True), []
        if description["computed_in"] == "fp32" and graph.is_file():
            return graph, serving, []
        asked = f"measured in {description['computed_in']}, which the server's OpenVINO can't be asked for"
        return fp32, serving, [f"{graph.name} was {asked}: {fp32.name} is served in its place"]
    return fp32, serving, []


def package_of_directory(directory: Path, proof: ProofVerdicts, options: ServingOptions) -> tuple[Package, list[str]]:
    """Return the package of a directory of results, with notes on files left out and on verdicts other than PASS.

    The preferred batch size comes from the bench record, and so does the largest one if the options have none.

    Raises BadInput for a directory without a reduced graph or package of AOTInductor.
    """
    fp32, fp16 = (directory / "reduced" / graph_name(precision) for precision in ("fp32", "fp16"))
    aoti = directory / "reduced" / FILE
    if not fp32.is_file() and not aoti.is_file():
        raise BadInput(f"{fp32}: no such graph; export the reduced model into {directory}/reduced first")
    plans, notes, left_out = _plans(directory / "reduced")
    cpu, serving, profiles = fp32 if fp32.is_file() else None, options.serving, tuple(options.batch)
    if cpu is None:
        pass
    elif serving.cpu_backend == "openvino":
        cpu, serving, own_notes = _in_openvino(directory, fp32, serving)
        notes += own_notes
    elif (quantised := quantised_graph(directory, "onnxruntime-cpu")) is not None:
        cpu, note = choose_served_file(directory, "onnxruntime-cpu", quantised)
        notes, left_out = ([*notes, note], {*left_out, quantised.name}) if note is not None else (notes, left_out)
    served = signature_from_package(notes_of_package(aoti), where=aoti) if cpu is None else signature_from_onnx(fp32)
    expected: dict[str, Expected] = {}
    preferred: tuple[int, ...] = ()
    if (directory / BENCH).is_file():
        bench = load_bench(directory / BENCH)
        knee = summarise(bench).preferred_batch_size
        preferred = () if knee is None or knee == 1 else (knee,)
        described = bench.subjects[1].describe
        same_backend = (described.get("backend") == "openvino") == (serving.cpu_backend == "openvino")
        served_so = described.get("device") != "cpu" or same_backend  # a CPU's figures hold for its own backend only
        if served_so and str(described.get("model", "")) not in left_out:
            expected = _expected(bench, _agreement(directory), has_plans=bool(plans))
    largest = None if plans or profiles else max((DEFAULT_MAX_BATCH, *preferred, *serving.graph_batches))
    package = Package(
        name=options.name,
        version=options.model_version,
        plans=plans,
        onnx=None if cpu is None else fp16 if fp16.is_file() else fp32,
        cpu_onnx=cpu,
        aoti=aoti if aoti.is_file() else None,
        labels=read_class_names(options.labels) if options.labels else _own_class_names(directory / "reduced", served),
        serving=replace(serving, preferred_batches=preferred, max_batch=serving.max_batch or largest),
        expected=expected,
        profiles=profiles,
        server=options.server,
        proof=proof.lines,
    )
    return package, [*notes, *proof.failed, *proof.undecided]


def unsign_repository(repository: Path) -> bool:
    """Remove the signature of a repository with its manifest; return True if there was a signature."""
    if signed := (repository / SIGNATURE).is_file() and unsign(repository):
        (repository / MANIFEST).unlink(missing_ok=True)
    return signed


def sign_repository(repository: Path, name: str, version: str, signer: Signer) -> None:
    """Write manifest.json, with the repository's name and files, and model.sig, which covers all files.

    Raises BadInput if `package lint` finds an error, or if the repository has files that package doesn't write.
    """
    errors = [each for each in lint_repository(repository) if each.severity == ERROR]
    if errors:
        raise BadInput(f"{repository}: not signed: {errors[0]}; `package lint` lists all errors")
    files = {
        path.relative_to(repository).as_posix(): entry_of(path)
        for path in entries_below(repository)
        if path.parent != repository or path.name == EXPECTED_NAME
    }
    head = {"kind": MANIFEST_KIND, "version": 1, "release": {"name": name, "version": version}}
    write_json(repository / MANIFEST, {**head, "versions": versions(), "files": files})
    sign(repository, signer, frozenset((*files, MANIFEST)))
