"""The work of the stages of a release that no command but `release` does; see steps for the other stages.

Every function reads the results of earlier stages below `dirs.root` and writes below `dirs.into`. This module imports
torch, so stage.py imports it only when a stage runs.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from corp_deploy.invocation.option import Invocation
from corp_deploy.invocation.proof import Runtime
from corp_deploy.machine import versions
from corp_deploy.proof.candidates import Candidate, candidate_from_path, in_runtime
from corp_deploy.proof.gate import judge_rows, parity_row, read_evidence, read_trend, with_fitted_rule, write_trend
from corp_deploy.proof.limits import ParityLimits
from corp_deploy.proof.model_inputs import inputs_from_set
from corp_deploy.proof.prove import run_proof
from corp_deploy.proof.report_input import effort_lines, gather_report, shown_lineage
from corp_deploy.store.checkpoint import load_checkpoint, save
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.store.manifest import MANIFEST_KIND, entries_of_model, entry_of, input_of_graphs
from corp_deploy.store.model_config import load_model_config
from export.engine.build import build_engine, write_engine
from export.engine.options import BuildOptions
from ground.effort import measure_effort
from ground.files import sha256_of_file, write_json, write_text
from perf.gate.gate import Gate, JudgedRule
from perf.gate.history import judge_history
from perf.gate.rule import rule_from_text
from perf.gate.verdicts import save_gate
from perf.parity.parity import load_parity
from perf.record.runs import load_bench
from perf.report.page import html_from_content
from perf.report.render import junit_from_content, markdown_from_content

from . import names
from .baseline import Baseline
from .card import render_card
from .digests import files_of
from .incremental import Stage, StageDirs
from .pace import efforts_of
from .recipe import Recipe, trusted_metrics
from .sbom import bill_of_release, provenance
from .steps import named_samples
from .targets import ReleaseTarget


def write_dense(dirs: StageDirs, recipe: Recipe) -> None:
    save(recipe.model.opened(), dirs.into / "dense")


def write_engines(dirs: StageDirs, target: ReleaseTarget, invocation: Invocation) -> None:
    """Build the target's engines of both models, the dense one without sparse kernels.

    For a quantised target, also build the reduced model's engine in the float precision that it is compared with.
    """
    plans = [(names.plan_name(target, subject), subject, target.precision) for subject in names.SUBJECTS]
    if target.rest is not None:
        plans.append((names.rival_name(target), "reduced", target.rest))
    for name, subject, precision in plans:
        options = BuildOptions(
            backend=target.name,
            precision=precision,
            profiles=(target.profile,),
            sms=target.sms,
            sparse=target.sparse and subject == "reduced",
            command=str(invocation),
        )
        path = dirs.into / name
        path.parent.mkdir(exist_ok=True)
        with measure_effort(dirs.watch, "build"):
            built = build_engine(dirs.root / subject / names.graph_name(precision), options)
        write_engine(built, path)


IN_OPENVINO: dict[str, Runtime] = {"fp32": "openvino", "fp16": "openvino-fp16", "bf16": "openvino-bf16"}


def _candidate(target: ReleaseTarget, root: Path) -> Candidate:
    candidate = candidate_from_path(names.artefact_name(target, "reduced"), below=root)
    if target.is_engine:
        return candidate
    if target.name == "openvino":
        return replace(in_runtime(candidate, IN_OPENVINO[target.precision]), name=target.name)
    return replace(candidate, label=f"{target.name} {target.precision}", name=target.name, provider="cuda")


def write_target_parity(dirs: StageDirs, recipe: Recipe, target: ReleaseTarget) -> None:
    """Compare the target's reduced engine or graph with the dense model on the release's samples; write the record."""
    dense, profile = load_checkpoint(dirs.root / "dense"), target.profile
    inputs = inputs_from_set(images_for_model(dense.model, dirs.root / names.SAMPLES))
    metrics = trusted_metrics(recipe.parity.metrics(dirs.root))
    fitting = [size for size in recipe.parity.batches if profile.smallest <= size <= profile.largest]
    limits = replace(ParityLimits.from_options(recipe.parity.values), batches=fitting or [profile.tuned])
    run_proof(
        dense,
        [candidate_from_path("reduced", below=dirs.root), _candidate(target, dirs.root)],
        inputs,
        limits.for_few_inputs(inputs.count, elsewhere="the held-out images"),
        output=dirs.into / names.parity_name(target),
        metrics=metrics,
        metric_inputs=named_samples(inputs, dirs.root) if metrics else None,
        below=dirs.root,
    )


def write_verdicts(dirs: StageDirs, recipe: Recipe, baseline: Baseline) -> None:
    """Write gate.json, and with a history its trend.

    The rows judge the parity records, the rules of [gate] on the first target, the rules of each target on that
    target, the gain of quantised targets, and the history of the first target. A parity record has to be judged by its
    own limits or by the rules of its target; for that of the first target these include the rules of [gate].
    """
    first, *others = recipe.targets
    own_rules = {names.parity_name(target): target.rules for target in others}
    own_rules |= dict.fromkeys((names.PARITY, names.parity_name(first)), (*recipe.rules, *first.rules))
    rows = [parity_row(dirs.root / name, own_rules.get(name, ())) for name in names.parities_of(recipe)]
    older = baseline.older(names.own_records(recipe, dirs.root))
    before = read_evidence(older.get("bench"), older.get("parity"))
    for target in recipe.targets:
        records = dirs.root / names.bench_name(recipe, target), dirs.root / names.parity_name(target)
        now = read_evidence(*records, recipe.gate.confidence)
        if target == recipe.targets[0]:
            # Samples are arrays made of held-out images; only the whole chain knows whether those were fitted to.
            assert now.parity is not None, dirs.root
            now = replace(now, parity=replace(now.parity, fitted=load_parity(dirs.root / names.PARITY).fitted))
            rows += judge_rows(with_fitted_rule(recipe.rules, now), now, before, starting=baseline.init)
        own = judge_rows(target.rules, now, None, starting=False)
        rows += [replace(row, rule=f"{target.name}: {row.rule}") for row in own]
        rows += _gain_rows(dirs.root, target, recipe.bench.batches)
    if recipe.gate.history is not None:
        trend = read_trend(dirs.root / names.bench_name(recipe, recipe.targets[0]), recipe.gate.history)
        write_trend(trend, dirs.into)
        rows += judge_history(trend)
    save_gate(Gate(rules=tuple(rows), confidence=recipe.gate.confidence), dirs.into / names.GATE)


def _gain_rows(root: Path, target: ReleaseTarget, batches: Sequence[int]) -> list[JudgedRule]:
    """Return judged rules by which a quantised model has to be faster than the reduced one in float precision `rest`.

    Their confidence is that of the bench record and not of [gate], as when `package` chooses the model to serve.
    """
    if target.rest is None:
        return []
    rules = [rule_from_text(f"speedup@b{batch} <= 1") for batch in batches]
    judged = judge_rows(rules, read_evidence(root / names.gain_name(target), None), None, starting=False)
    return [replace(row, rule=f"{target.name}: {target.precision} over {target.rest}: {row.rule}") for row in judged]


def _lineage(root: Path) -> dict[str, Any]:
    return shown_lineage(load_model_config(root / "reduced"))


def write_release_report(dirs: StageDirs, recipe: Recipe, commands: Sequence[str], stages: Sequence[str]) -> None:
    """Write the report of the first target in three formats, a page for each other target, and the model card."""
    efforts = efforts_of(dirs.root, stages)
    content = replace(
        gather_report(dirs.root),  # the manifest, which has lineage and commands, is written later
        title=f"{recipe.name}: dense against reduced",
        lineage=_lineage(dirs.root) | {"recipe": sha256_of_file(dirs.root / names.RECIPE)},
        commands=tuple(commands),
        effort=effort_lines(efforts),
    )
    writers = (html_from_content, markdown_from_content, junit_from_content)
    for name, writer in zip(names.REPORTS, writers, strict=True):
        write_text(dirs.into / name, writer(content))
    for target in recipe.targets[1:]:
        own = replace(
            content,
            title=f"{recipe.name} on {target.name}: dense against reduced",
            bench=load_bench(dirs.root / names.bench_name(recipe, target)),
            parity=load_parity(dirs.root / names.parity_name(target)),
        )
        write_text(dirs.into / names.page_name(target), html_from_content(own))
    write_text(dirs.into / names.CARD, render_card(dirs.root, recipe, commands, efforts))


def write_release_manifest(dirs: StageDirs, recipe: Recipe, stages: Sequence[Stage], command: str, own: str) -> None:
    """Write the bill of materials, the manifest of all files, their provenance, and SHA256SUMS.

    For the record, `command` is the command that makes the release, and `own` the one that runs this stage alone.
    """
    root = dirs.root
    write_json(dirs.into / names.BILL, bill_of_release(root, recipe))
    files = {
        path.relative_to(root).as_posix(): entry_of(path, stage.command)
        for stage in stages
        for name in stage.outputs
        for path in files_of(root / name)
        if not name.startswith(".")
    }
    files[names.BILL] = entry_of(dirs.into / names.BILL, own)
    files = {name: files[name] for name in sorted(files)}
    manifest = {
        "kind": MANIFEST_KIND,
        "version": 1,
        "release": {"name": recipe.name, "version": recipe.release.version},
        "command": command,
        "versions": versions(),
        "lineage": _lineage(root),
        **entries_of_model(load_model_config(root / "reduced")),
        "preprocessing": load_model_config(root / "dense").input.preprocessing,
        **input_of_graphs(root),
        "stages": [stage.name for stage in stages],
        "files": files,
    }
    write_json(dirs.into / names.MANIFEST, manifest)
    digests = {name: str(entry["sha256"]) for name, entry in files.items()}
    digests[names.MANIFEST] = sha256_of_file(dirs.into / names.MANIFEST)
    write_json(dirs.into / names.PROVENANCE, provenance(root, recipe, stages, digests))
    digests[names.PROVENANCE] = sha256_of_file(dirs.into / names.PROVENANCE)
    write_text(dirs.into / names.SUMS, "".join(f"{digests[name]}  {name}\n" for name in sorted(digests)))
