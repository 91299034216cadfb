"""What the stages of a release do that no other command does; see steps for the rest. Everything heavy is imported
here, so a run with nothing to do never waits for it.

Every function reads what earlier stages left in `place.root` and writes below `place.into` only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from corp_deploy.invocation.call import Invocation
from corp_deploy.proof.candidates import Candidate, candidate_from_path
from corp_deploy.proof.chain import ParityLimits, given_from_images, prove
from corp_deploy.proof.gate import evidence_of_files, judged_rows, parity_row
from corp_deploy.proof.record import save_proof
from corp_deploy.proof.report_input import record_of_directory
from corp_deploy.store.checkpoint import load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.inputs import images_for_model
from export.engine.build import build_engine, write_engine
from export.engine.options import BuildOptions
from ground.files import read_json, sha256_of_file, write_json, write_text
from perf.gate.gate import Gate
from perf.gate.verdicts import save_gate
from perf.report.render import html, junit, markdown
from perf.runners.onnx import OnnxRunner

from .calls import SAMPLES, SUBJECTS, bench_name, parity_name
from .card import card
from .incremental import StageDirs
from .recipe import Recipe, Target
from .samples import KIND as SAMPLES_KIND
from .samples import REPLAY_ERROR, replayed
from .targets import artefact_name, graph_name, plan_name


def write_dense(place: StageDirs, recipe: Recipe) -> None:
    """The trained model as a directory of its own."""
    given = recipe["model"]
    dense = load_dense(
        given["model"],
        weights=recipe.optional_path("model", "weights"),
        kwargs=given["kwargs"],
        ema=given["ema"],
        preprocessing=recipe.preprocessing,
    )
    save(dense, place.into / "dense")


def write_samples(place: StageDirs, recipe: Recipe) -> None:
    """A few preprocessed held-out images, and what every graph answers to them."""
    held_out = recipe["held_out"]
    model = load_checkpoint(place.root / "dense").model
    source = images_for_model(
        model, recipe.path("held_out", "images"), samples=held_out["samples"], seed=held_out["seed"]
    )
    count = min(recipe["samples"]["count"], source.count)
    images = next(iter(source.batches(count))).numpy()
    folder = place.into / "samples"
    folder.mkdir()
    np.save(place.into / SAMPLES, images)
    graphs = {}
    for subject in SUBJECTS:
        for precision in recipe["export"]["precisions"]:
            name = f"{subject}/{graph_name(precision)}"
            expected = f"samples/{subject}.{precision}.npy"
            with OnnxRunner(place.root / name) as runner:
                np.save(place.into / expected, replayed(runner, images))
            graphs[name] = {"expected": expected, "max_relative_error": REPLAY_ERROR[precision]}
    record = {"kind": SAMPLES_KIND, "version": 1, "images": SAMPLES, "count": count, "graphs": graphs}
    write_json(folder / "samples.json", record)


def _limits(recipe: Recipe) -> ParityLimits:
    return ParityLimits(**{key: recipe["parity"][key] for key in ("min_agreement", "max_error", "half_factor")})


def write_engines(place: StageDirs, target: Target, invocation: Invocation) -> None:
    """Dense and reduced plans with their records."""
    for subject in SUBJECTS:
        options = BuildOptions(
            backend=target.name,
            precision=target.precision,
            profiles=(target.profile,),
            sms=target.sms,
            command=str(invocation),
        )
        path = place.into / plan_name(target, subject)
        write_engine(build_engine(place.root / subject / graph_name(target.precision), options), path)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaCandidate(Candidate):
    """A graph that ONNX Runtime runs on the GPU."""

    def _runner(self, scratch: Path) -> OnnxRunner:
        return OnnxRunner(self.path, provider="cuda")


def _candidate(target: Target, root: Path) -> Candidate:
    name = artefact_name(target, "reduced")
    if target.is_engine:
        return candidate_from_path(name, below=root)
    half = target.precision != "fp32"
    label = f"{target.name} {target.precision}"
    return CudaCandidate(label=label, name=target.name, form="graph", path=root / name, shown=Path(name), half=half)


def write_target_parity(place: StageDirs, recipe: Recipe, target: Target) -> None:
    """The chain down to what the target runs, on the samples, which travel with the release."""
    dense = load_checkpoint(place.root / "dense")
    fitting = [
        size for size in recipe["parity"]["batches"] if target.profile.smallest <= size <= target.profile.largest
    ]
    proof = prove(
        dense,
        [candidate_from_path("reduced", below=place.root), _candidate(target, place.root)],
        given_from_images(images_for_model(dense.model, place.root / SAMPLES)),
        batches=fitting or [target.profile.tuned],
        limits=_limits(recipe),
    )
    save_proof(proof, place.into / parity_name(target))


def write_gate(place: StageDirs, recipe: Recipe, older: Path | None, starting: bool) -> None:
    """Parity first, then the recipe's rules on the first target, then each target's own."""
    records = ["parity.json", *(parity_name(target) for target in recipe.targets)]
    rows = [parity_row(place.root / name) for name in dict.fromkeys(records)]
    for target in recipe.targets:
        now = evidence_of_files(place.root / bench_name(recipe, target), place.root / parity_name(target))
        if target == recipe.targets[0]:
            rows += judged_rows(recipe.rules, now, older, starting=starting)
        own = judged_rows(target.rules, now, None, starting=False)
        rows += [replace(row, rule=f"{target.name}: {row.rule}") for row in own]
    save_gate(Gate(rules=tuple(rows)), place.into / "gate.json")


def _record(place: StageDirs, recipe: Recipe, commands: Sequence[str]) -> dict[str, Any]:
    """Everything the report shows; lineage and commands come from here, since the manifest is made after it."""
    lineage = read_json(place.root / "reduced" / "config.json", kind="corp-deploy/model")["lineage"]
    kept = {key: value for key, value in lineage.items() if key not in ("reduction", "command")}
    return record_of_directory(place.root) | {
        "title": f"{recipe.name}: dense against reduced",
        "lineage": kept | {"recipe": sha256_of_file(place.root / "recipe.toml")},
        "commands": list(commands),
    }


def write_report(place: StageDirs, recipe: Recipe, commands: Sequence[str]) -> None:
    """The report of the first target in three forms, of the others as pages, and the model card."""
    record = _record(place, recipe, commands)
    for name, writer in (("report.html", html), ("report.md", markdown), ("report.xml", junit)):
        write_text(place.into / name, writer(record))
    for target in recipe.targets[1:]:
        own = record | {
            "title": f"{recipe.name} on {target.name}: dense against reduced",
            "bench": read_json(place.root / bench_name(recipe, target), kind="bench"),
            "parity": read_json(place.root / parity_name(target), kind="parity"),
        }
        write_text(place.into / f"report.{target.name}.html", html(own))
    write_text(place.into / "MODEL_CARD.md", card(place.root, recipe, commands))
