"""What each stage of a release does. Everything heavy is imported here, so a run with nothing to do never waits for it.

Every function reads what earlier stages left in `place.root` and writes below `place.into` only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calib.checkpoint import Checkpoint as Saved
from calib.images import Images, parted
from calib.store import load as load_moments
from calib.store import save as save_moments
from export.choices import BuildChoices
from export.engine import build_engine, write_engine
from export.triton import write_repository
from perf.gate import Gate
from perf.onnx_runner import OnnxRunner
from perf.report import html, junit, markdown
from perf.runs import save_bench
from perf.timing import Plan
from perf.verdicts import save_gate

from .calibration import Wanted, calibrate, summary_of_moments
from .candidates import Candidate, candidate_from_path
from .chain import Limits, given_from_images, prove
from .checkpoint import load_checkpoint, load_dense, save
from .files import read_json, replacing, sha256_of_file, write_json, write_text
from .gating import evidence_of_files, judged_rows, parity_row
from .graphs import export_checkpoint
from .inputs import images_for_model, labels_from_path, require_device
from .model_card import card
from .packaging import package_of_directory
from .planning import Asked, Budget
from .proofs import save_proof
from .recipe import Recipe, Target
from .records import record_of_directory
from .reducing import reduce_checkpoint
from .release import HELD_OUT_MOMENTS, MOMENTS, SUBJECTS, bench_name, parity_name
from .sample_record import KIND as SAMPLES_KIND
from .sample_record import REPLAY_ERROR, replayed
from .shift_check import PARTS
from .side_by_side import Running, measure
from .stages import Place
from .targets import artefact_name, graph_name, plan_name, running_words

SAVE_EVERY_IMAGES = 1024


def write_dense(place: Place, recipe: Recipe) -> None:
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


def _images(recipe: Recipe, table: str, root: Path) -> Images:
    given = {key: recipe[table][key] for key in ("samples", "seed")}
    if table == "calibration":
        given |= {key: recipe[table][key] for key in ("workers", "max_bad")}
    return images_for_model(load_checkpoint(root / "dense").model, recipe.path(table, "images"), **given)


def write_moments(place: Place, recipe: Recipe) -> None:
    """The calibration, which goes on from its own state after an interruption."""
    given = recipe["calibration"]
    require_device(given["device"])
    dense, images = load_checkpoint(place.root / "dense"), _images(recipe, "calibration", place.root)
    parts = {MOMENTS: images}
    if given["hold_out"] is not None:
        parts = dict(
            zip((MOMENTS, HELD_OUT_MOMENTS), parted(images, given["hold_out"], seed=given["seed"]), strict=True)
        )
    for name, part in parts.items():
        # Of the two, the pass over all the other images is the one worth going on with.
        saved = Saved(path=place.unfinished, every=SAVE_EVERY_IMAGES) if name == MOMENTS else None
        moments = calibrate(
            dense,
            part,
            batch_size=given["batch_size"],
            device=given["device"],
            wanted=Wanted(attention_system=recipe.choices.needs_attention_system),
            saved=saved,
        )
        with replacing(place.into / name) as temporary:
            save_moments(moments, temporary)
    taken = load_moments(place.into / MOMENTS)
    summary = summary_of_moments(taken, place.into / MOMENTS) | {"moments": MOMENTS}
    write_json(place.into / "moments.json", {"kind": "corp-deploy/moments-reference", "version": 1, **summary})


def write_reduced(place: Place, recipe: Recipe) -> None:
    """The smaller model."""
    wanted = recipe["reduce"]
    budgets = [Budget(currency=name, share=wanted[name]) for name in ("macs", "params") if wanted[name] is not None]
    asked = Asked(
        preset=wanted["preset"],
        choices=recipe.choices,
        budget=budgets[0] if budgets else None,
        auto_heads=wanted["heads"] == "auto",
        closed_loop=wanted["closed_loop"],
        allow_partial=wanted["allow_partial"],
    )
    images = _images(recipe, "calibration", place.root) if asked.needs_images else None
    reduce_checkpoint(
        load_checkpoint(place.root / "dense"),
        place.root / MOMENTS,
        asked,
        directory=place.into / "reduced",
        images=images,
        held_out=None if recipe["calibration"]["hold_out"] is None else load_moments(place.root / HELD_OUT_MOMENTS),
    )


def write_graphs(place: Place, recipe: Recipe, subject: str) -> None:
    """Typed ONNX graphs of the dense or the reduced model."""
    checkpoint = load_checkpoint(place.root / subject)
    for precision in recipe["export"]["precisions"]:
        keep = recipe["export"]["keep_fp32"] if precision == "mixed" else ()
        path = place.into / subject / graph_name(precision)
        export_checkpoint(checkpoint, path, precision=precision, keep_fp32=keep)


def write_samples(place: Place, recipe: Recipe) -> None:
    """A few preprocessed held-out images, and what every graph answers to them."""
    source = _images(recipe, "held_out", place.root)
    count = min(recipe["samples"]["count"], source.count)
    images = next(iter(source.batches(count))).numpy()
    folder = place.into / "samples"
    folder.mkdir()
    np.save(folder / "images.npy", images)
    graphs = {}
    for subject in SUBJECTS:
        for precision in recipe["export"]["precisions"]:
            name = f"{subject}/{graph_name(precision)}"
            expected = f"samples/{subject}.{precision}.npy"
            with OnnxRunner(place.root / name) as runner:
                np.save(place.into / expected, replayed(runner, images))
            graphs[name] = {"expected": expected, "max_relative_error": REPLAY_ERROR[precision]}
    record = {"kind": SAMPLES_KIND, "version": 1, "images": "samples/images.npy", "count": count, "graphs": graphs}
    write_json(folder / "samples.json", record)


def _limits(recipe: Recipe) -> Limits:
    return Limits(**{key: recipe["parity"][key] for key in ("min_agreement", "max_error", "half_factor")})


def write_parity(place: Place, recipe: Recipe) -> None:
    """The chain from the dense model to its graphs, on the held-out images; enough of them are also compared with the
    calibration images.
    """
    source = _images(recipe, "held_out", place.root)
    labels = recipe.optional_path("held_out", "labels")
    graphs = [place.root / "reduced" / graph_name(precision) for precision in recipe["export"]["precisions"]]
    proof = prove(
        load_checkpoint(place.root / "dense"),
        [candidate_from_path(path) for path in (place.root / "reduced", *graphs)],
        given_from_images(source, None if labels is None else labels_from_path(labels, source)),
        batches=recipe["parity"]["batches"],
        limits=_limits(recipe),
        moments=load_moments(place.root / MOMENTS) if source.count >= PARTS else None,
    )
    save_proof(proof, place.into / "parity.json")


def write_engines(place: Place, target: Target, command: str) -> None:
    """Dense and reduced plans with their records."""
    for subject in SUBJECTS:
        choices = BuildChoices(
            backend=target.name,
            precision=target.precision,
            profiles=(target.profile,),
            sms=target.sms,
            command=command,
        )
        path = place.into / plan_name(target, subject)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_engine(build_engine(place.root / subject / graph_name(target.precision), choices), path)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaCandidate(Candidate):
    """A graph that ONNX Runtime runs on the GPU."""

    def _runner(self, scratch: Path) -> OnnxRunner:
        return OnnxRunner(self.path, provider="cuda")


def _candidate(target: Target, root: Path) -> Candidate:
    path = root / artefact_name(target, "reduced")
    if target.is_engine:
        return candidate_from_path(path)
    half = target.precision != "fp32"
    return CudaCandidate(
        label=f"{target.name} {target.precision}", name=target.name, form="graph", path=path, half=half
    )


def write_target_parity(place: Place, recipe: Recipe, target: Target) -> None:
    """The chain down to what the target runs, on the samples, which travel with the release."""
    dense = load_checkpoint(place.root / "dense")
    fitting = [
        size for size in recipe["parity"]["batches"] if target.profile.smallest <= size <= target.profile.largest
    ]
    proof = prove(
        dense,
        [candidate_from_path(place.root / "reduced"), _candidate(target, place.root)],
        given_from_images(images_for_model(dense.model, place.root / "samples" / "images.npy")),
        batches=fitting or [target.profile.tuned],
        limits=_limits(recipe),
    )
    save_proof(proof, place.into / parity_name(target))


def _fed(root: Path, batches: Sequence[int]) -> NDArray[np.float32]:
    images: NDArray[np.float32] = np.load(root / "samples" / "images.npy")
    return np.resize(images, (max(batches), *images.shape[1:]))


def write_bench(place: Place, recipe: Recipe, target: Target, command: str) -> None:
    """Dense against reduced on one target."""
    wanted = recipe["bench"]
    plan = Plan(
        time_limit_s=wanted["time_limit_s"],
        half_width_rel=wanted["half_width"],
        block_ms=wanted["block_ms"],
        min_rounds=wanted["min_rounds"],
    )
    dense, reduced = (place.root / artefact_name(target, name) for name in SUBJECTS)
    measured = measure(
        dense,
        reduced,
        batches=wanted["batches"],
        plan=plan,
        running=Running(**running_words(target, wanted["threads"])),
        images=_fed(place.root, wanted["batches"]),
        command=command.split(),
    )
    save_bench(measured, place.into / bench_name(recipe, target))


def write_gate(place: Place, recipe: Recipe, older: Path | None, starting: bool) -> None:
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


def write_package(place: Place, recipe: Recipe) -> None:
    """The model repository that an inference server loads as it is."""
    labels = recipe.optional_path("package", "labels")
    what, _ = package_of_directory(place.root, name=recipe["package"]["name"], version=1, labels=labels, server=None)
    write_repository(what, place.into / "repository")


def _record(place: Place, recipe: Recipe, commands: Sequence[str]) -> dict[str, Any]:
    """Everything the report shows; lineage and commands come from here, since the manifest is made after it."""
    lineage = read_json(place.root / "reduced" / "config.json", kind="corp-deploy/model")["lineage"]
    kept = {key: value for key, value in lineage.items() if key not in ("reduction", "command")}
    return record_of_directory(place.root) | {
        "title": f"{recipe.name}: dense against reduced",
        "lineage": kept | {"recipe": sha256_of_file(place.root / "recipe.toml")},
        "commands": list(commands),
    }


def write_report(place: Place, recipe: Recipe, commands: Sequence[str]) -> None:
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
    write_text(place.into / "MODEL_CARD.md", card(place.root, recipe))
