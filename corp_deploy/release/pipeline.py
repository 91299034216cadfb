"""A release: the stages of a recipe, in order, and the verbs that run, plan and script them. Imports no torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corp_deploy import __version__
from corp_deploy.families.preprocessing import recorded_preprocessing
from corp_deploy.families.timm_names import require_local_name
from corp_deploy.invocation.call import Invocation
from corp_deploy.machine import versions
from corp_deploy.store.hub_snapshot import config_of_directory, is_ours, refuse_beside_directory
from corp_deploy.store.manifest import MANIFEST_KIND
from ground.errors import BadInput, Missing
from ground.files import read_json, sha256_of_file, write_json, write_text
from ground.gpu import missing_gpu

from . import calls as commands
from .baseline import Baseline
from .calls import HELD_OUT_MOMENTS, MOMENTS, SAMPLES, SUBJECTS, SUMMARY, bench_name, graphs_of, parity_name
from .incremental import Outcome, Stage, StageDirs, StageStatus, files_of, locked, run
from .incremental import plan as plan_stages
from .recipe import Recipe, Target
from .recipe_toml import text_of_recipe
from .targets import artefact_name, build_lack, graph_name, plan_name, run_lack

SCRIPT, SUMS, MANIFEST = "remaining.sh", "SHA256SUMS", "manifest.json"
MODELS = tuple(f"{name}/{file}" for name in SUBJECTS for file in ("config.json", "model.safetensors"))
TORCH = ("torch", "timm", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """What a run did and the gate's verdict; both gate fields are None while stages wait for another machine."""

    outcome: Outcome
    verdict: str | None
    exit_code: int | None


def _tool(*packages: str) -> dict[str, str]:
    """Versions that a stage's result depends on. A GPU's stages name none: that machine has others."""
    found = versions()
    return {"corp-deploy": __version__} | {name: found[name] for name in packages if name in found}


def _step(name: str, *words: Any) -> Callable[[StageDirs], None]:
    """A function of release_steps, imported when it is called."""

    def does(place: StageDirs) -> None:
        from . import own_steps as release_steps

        functions: dict[str, Callable[..., object]] = {
            "dense": release_steps.write_dense,
            "samples": release_steps.write_samples,
            "engine": release_steps.write_engines,
            "target-parity": release_steps.write_target_parity,
            "gate": release_steps.write_gate,
            "report": release_steps.write_report,
        }
        functions[name](place, *words)

    return does


def _run(invocation: Invocation) -> Callable[[StageDirs], None]:
    """The step of a command, run from the values that are printed; imported when it is called."""

    def does(place: StageDirs) -> None:
        from . import steps

        functions: dict[str, Callable[[StageDirs, Invocation], object]] = {
            "calibrate": steps.write_moments,
            "reduce": steps.write_reduced,
            "export": steps.write_graphs,
            "verify": steps.write_parity,
            "bench": steps.write_bench,
            "package": steps.write_package,
        }
        functions[invocation.command](place, invocation)

    return does


def _model_stages(recipe: Recipe, root: Path) -> Iterator[Stage]:
    model, calibration, wanted = recipe["model"], recipe["calibration"], recipe["reduce"]
    weights = recipe.optional_path("model", "weights")
    outside = {"model": Path(model["model"])} if recipe.model_is_directory else {}
    if weights is not None:
        outside["weights"] = weights
    name = {} if recipe.model_is_directory else {"model.model": model["model"]}

    def write_recipe(place: StageDirs) -> None:
        write_text(place.into / "recipe.toml", text_of_recipe(recipe, root))

    text = text_of_recipe(recipe, root)
    yield Stage(
        name="recipe",
        makes=("recipe.toml",),
        does=write_recipe,
        settings={"recipe": text},
        command=str(commands.only("recipe")),
    )
    yield Stage(
        name="dense",
        makes=MODELS[:2],
        does=_step("dense", recipe),
        outside=outside,
        settings={
            **name,
            **{f"model.{key}": value for key, value in model.items() if key not in ("model", "weights")},
            "versions": _tool(*TORCH),
        },
        command=str(commands.only("dense")),
    )
    on_gpu = calibration["device"] == "cuda"
    held_out = [] if calibration["hold_out"] is None else [HELD_OUT_MOMENTS]
    calibrate = commands.calibrate(recipe, root)
    # How the system is taken stands in what the command says of it.
    drawn = {key: value for key, value in calibration.items() if key not in ("images", "workers", "attention_system")}
    system = {key: calibrate[key] for key in ("attention_system", "attn", "align") if calibrate[key] is not None}
    yield Stage(
        name="moments",
        makes=(MOMENTS, SUMMARY, *held_out),
        does=_run(calibrate),
        reads=MODELS[:2],
        outside={"calibration.images": recipe.path("calibration", "images")},
        settings={f"calibration.{key}": value for key, value in drawn.items()}
        | {**system, "versions": _tool(*() if on_gpu else TORCH)},
        lack=missing_gpu if on_gpu else lambda: None,
        command=str(calibrate),
    )
    reduce = commands.reduce(recipe, root)
    looks = "images" in reduce.options
    looked_at = {f"calibration.{key}": calibration[key] for key in ("samples", "seed", "max_bad")} if looks else {}
    yield Stage(
        name="reduce",
        makes=MODELS[2:],
        does=_run(reduce),
        reads=(*MODELS[:2], MOMENTS, *held_out),
        outside={"calibration.images": recipe.path("calibration", "images")} if looks else {},
        settings={f"reduce.{key}": value for key, value in wanted.items()} | looked_at | {"versions": _tool(*TORCH)},
        command=str(reduce),
    )


def _graph_stages(recipe: Recipe, root: Path) -> Iterator[Stage]:
    precisions = recipe["export"]["precisions"]
    for subject, model in zip(SUBJECTS, (MODELS[:2], MODELS[2:]), strict=True):
        export = commands.export(recipe, subject)
        yield Stage(
            name=f"export.{subject}",
            makes=graphs_of(recipe, subject),
            does=_run(export),
            reads=model,
            settings={f"export.{key}": value for key, value in recipe["export"].items()}
            | {"versions": _tool(*TORCH, "onnx", "onnxscript")},
            command=str(export),
        )
    graphs = (*graphs_of(recipe, "dense"), *graphs_of(recipe, "reduced"))
    held_out = recipe["held_out"]
    drawn = {f"held_out.{key}": held_out[key] for key in ("samples", "seed")}
    images = {"held_out.images": recipe.path("held_out", "images")}
    answers = [f"samples/{subject}.{precision}.npy" for subject in SUBJECTS for precision in precisions]
    yield Stage(
        name="samples",
        makes=(SAMPLES, "samples/samples.json", *answers),
        does=_step("samples", recipe),
        reads=(*MODELS[:2], *graphs),
        outside=images,
        settings={**drawn, "samples.count": recipe["samples"]["count"], "versions": _tool(*TORCH, "onnxruntime")},
        command=str(commands.only("samples")),
    )
    labels = recipe.optional_path("held_out", "labels")
    verify = commands.verify(recipe, root)
    yield Stage(
        name="parity",
        makes=("parity.json", "parity.npz"),
        does=_run(verify),
        reads=(*MODELS, MOMENTS, *graphs_of(recipe, "reduced")),
        outside=images | ({} if labels is None else {"held_out.labels": labels}),
        settings={f"parity.{key}": value for key, value in recipe["parity"].items()}
        | {**drawn, "versions": _tool(*TORCH, "onnxruntime")},
        command=str(verify),
    )


def _engine_stages(recipe: Recipe, target: Target) -> Iterator[Stage]:
    graphs = tuple(f"{subject}/{graph_name(target.precision)}" for subject in SUBJECTS)
    name = f"engine.{target.name}"
    plans = tuple(plan_name(target, subject) for subject in SUBJECTS)
    yield Stage(
        name=name,
        makes=(*plans, *(f"{plan}.json" for plan in plans)),
        does=_step("engine", target, commands.only(name)),
        reads=graphs,
        settings={"precision": target.precision, "batch": str(target.profile), "sms": target.sms, "versions": _tool()},
        lack=lambda: build_lack(target),
        command=str(commands.only(name)),
    )


def _target_stages(recipe: Recipe, target: Target) -> Iterator[Stage]:
    if target.is_engine:
        yield from _engine_stages(recipe, target)
    local = target.name == "onnxruntime-cpu"
    artefacts = tuple(artefact_name(target, subject) for subject in SUBJECTS)
    records = tuple(f"{name}.json" for name in artefacts) if target.is_engine else ()
    graphs = tuple(f"{subject}/{graph_name(target.precision)}" for subject in SUBJECTS)
    reads = tuple(dict.fromkeys((*graphs, *artefacts, *records, SAMPLES)))
    if not local:
        parity = parity_name(target)
        yield Stage(
            name=f"parity.{target.name}",
            makes=(parity, f"{parity.removesuffix('.json')}.npz"),
            does=_step("target-parity", recipe, target),
            reads=tuple(dict.fromkeys((*MODELS, *reads))),
            settings={f"parity.{key}": value for key, value in recipe["parity"].items()} | {"versions": _tool()},
            lack=lambda: run_lack(target),
            command=str(commands.only(f"parity.{target.name}")),
        )
    bench = commands.bench(recipe, target)
    yield Stage(
        name=f"bench.{target.name}",
        makes=(bench_name(recipe, target),),
        does=_run(bench),
        reads=reads,
        settings={f"bench.{key}": value for key, value in recipe["bench"].items()}
        | {"precision": target.precision, "versions": _tool(*(("onnxruntime",) if local else ()))},
        lack=lambda: run_lack(target),
        command=str(bench),
    )


def _package_stage(recipe: Recipe, root: Path, records: Sequence[str]) -> Stage:
    """The Triton model repository of everything that was built."""
    package, labels = commands.package(recipe, root), recipe.optional_path("package", "labels")
    plans = [artefact_name(target, "reduced") for target in recipe.targets if target.is_engine]
    return Stage(
        name="package",
        makes=("repository/",),
        does=_run(package),
        reads=(*graphs_of(recipe, "reduced"), *plans, *(f"{plan}.json" for plan in plans), *records),
        outside={} if labels is None else {"package.labels": labels},
        settings={"package.name": recipe["package"]["name"], "versions": _tool()},
        command=str(package),
    )


def _gate_stages(recipe: Recipe, root: Path, before: Sequence[Stage], baseline: Baseline) -> Iterator[Stage]:
    benches = tuple(bench_name(recipe, target) for target in recipe.targets)
    parities = tuple(dict.fromkeys(("parity.json", *map(parity_name, recipe.targets))))
    older = baseline.older(root / benches[0])
    rules = {"gate.fail_if": recipe["gate"]["fail_if"]}
    rules |= {f"targets.{target.name}.fail_if": [rule.text for rule in target.rules] for target in recipe.targets}
    gate = Stage(
        name="gate",
        makes=("gate.json",),
        does=_step("gate", recipe, older, baseline.init),
        reads=(*benches, *parities),
        outside={} if older is None else {"baseline": older},
        settings={**rules, "targets": [target.name for target in recipe.targets], "versions": _tool()},
        command=str(commands.gate(recipe, root, baseline)),
    )
    packages = [] if recipe["package"]["name"] is None else [_package_stage(recipe, root, (*benches, *parities))]
    yield from (gate, *packages)
    printed = [stage.command for stage in (*before, gate, *packages)]
    pages = tuple(f"report.{target.name}.html" for target in recipe.targets[1:])
    yield Stage(
        name="report",
        makes=("report.html", "report.md", "report.xml", "MODEL_CARD.md", *pages),
        does=_step("report", recipe, printed),
        reads=("recipe.toml", "reduced/config.json", "moments.json", *benches, *parities, "gate.json"),
        settings={"commands": printed, "versions": _tool()},
        command=str(commands.only_beside("report", baseline, root)),
    )


def _write_manifest(place: StageDirs, stages: Sequence[Stage], command: str) -> None:
    """manifest.json over all that was made, then SHA256SUMS over that and the manifest."""
    made_by = {
        path.relative_to(place.root).as_posix(): stage.command
        for stage in stages
        for name in stage.makes
        for path in files_of(place.root / name)
    }
    shipped = sorted(name for name in made_by if not name.startswith("."))
    files = {
        name: {
            "sha256": sha256_of_file(place.root / name),
            "size_bytes": (place.root / name).stat().st_size,
            "made_by": made_by[name],
        }
        for name in shipped
    }
    lineage = read_json(place.root / "reduced" / "config.json", kind="corp-deploy/model")["lineage"]
    kept = {key: value for key, value in lineage.items() if key not in ("reduction", "command")}
    manifest = {
        "kind": MANIFEST_KIND,
        "version": 1,
        "command": command,
        "versions": versions(),
        "lineage": kept,
        "preprocessing": recorded_preprocessing(place.root / MODELS[0]),
        "stages": [stage.name for stage in stages],
        "files": files,
    }
    write_json(place.into / MANIFEST, manifest)
    digests = {name: str(entry["sha256"]) for name, entry in files.items()}
    digests[MANIFEST] = sha256_of_file(place.into / MANIFEST)
    write_text(place.into / SUMS, "".join(f"{digests[name]}  {name}\n" for name in sorted(digests)))


def stages_of(recipe: Recipe, root: Path, baseline: Baseline) -> list[Stage]:
    """Every stage of the recipe, in an order in which each finds what it reads."""
    stages = [*_model_stages(recipe, root), *_graph_stages(recipe, root)]
    for target in recipe.targets:
        stages += _target_stages(recipe, target)
    stages += _gate_stages(recipe, root, stages, baseline)
    before = tuple(stages)
    command = str(commands.whole(baseline, root))
    reads = tuple(name for stage in before for name in stage.makes if not name.startswith("."))
    last = Stage(
        name="manifest",
        makes=(MANIFEST, SUMS),
        does=lambda place: _write_manifest(place, before, command),
        reads=reads,
        settings={"versions": versions(), "commands": [command, *(stage.command for stage in before)]},
    )
    return [*before, last]


def _require_model(recipe: Recipe) -> None:
    """Raise BadInput for a name that is no model here, and for keys that a directory of ours has itself."""
    model = recipe["model"]
    if not recipe.model_is_directory:
        require_local_name(model["model"])
        if model["weights"] is None:
            raise BadInput(f"model.weights: the timm model {model['model']!r} needs the weights of a trained model")
    elif Path(model["model"]).is_dir() and is_ours(config_of_directory(Path(model["model"]))):
        others = {f"model.{key}": value for key, value in model.items() if key != "model"}
        refuse_beside_directory(Path(model["model"]), others)


def require_inputs(recipe: Recipe, baseline: Baseline) -> None:
    """Raise BadInput, naming the key, when something outside that a release needs is not there."""
    paths = {
        "calibration.images": recipe.path("calibration", "images"),
        "held_out.images": recipe.path("held_out", "images"),
    }
    for table, key in (("model", "weights"), ("held_out", "labels"), ("package", "labels")):
        given = recipe.optional_path(table, key)
        if given is not None:
            paths[f"{table}.{key}"] = given
    _require_model(recipe)
    if recipe.model_is_directory:
        paths["model.model"] = Path(recipe["model"]["model"]) / "config.json"
    for key, path in paths.items():
        if not files_of(path):
            raise BadInput(f"{key}: {path} is not there, or is empty; correct the recipe")
    asking = [rule.text for rule in recipe.rules if rule.wants_baseline]
    baseline.require()
    if asking and baseline.path is None:
        raise BadInput(f"gate.fail_if: {asking[0]!r} needs --baseline FILE, at first with --init-baseline")


def plan_release(recipe: Recipe, root: Path, baseline: Baseline) -> list[StageStatus]:
    """What `release` would do now; writes nothing."""
    require_inputs(recipe, baseline)
    return plan_stages(stages_of(recipe, root, baseline), root)


def _run_all(recipe: Recipe, root: Path, baseline: Baseline, told: Callable[[Stage, str], None]) -> Outcome:
    """In two parts: whether the baseline is this very record is known only when the bench stands."""
    stages = stages_of(recipe, root, baseline)
    gate = next(index for index, stage in enumerate(stages) if stage.name == "gate")
    first = run(stages[:gate], root, told=told, whole=False)
    if first.blocked:
        return first
    rest = run(stages_of(recipe, root, baseline), root, told=told)
    made = (*first.made, *rest.made)
    return Outcome(made=made, cached=tuple(name for name in rest.cached if name not in made), blocked=rest.blocked)


def release(
    recipe: Recipe, root: Path, baseline: Baseline, *, told: Callable[[Stage, str], None] = lambda stage, why: None
) -> Released:
    """Make what is not done. Raises BadInput when another process works in the directory."""
    require_inputs(recipe, baseline)
    root.mkdir(parents=True, exist_ok=True)
    with locked(root):
        outcome = _run_all(recipe, root, baseline, told)
        if outcome.blocked:
            return Released(outcome=outcome, verdict=None, exit_code=None)
        gate = read_json(root / "gate.json", kind="gate")
        baseline.start(root / bench_name(recipe, recipe.targets[0]), exit_code=gate["exit_code"])
    return Released(outcome=outcome, verdict=gate["verdict"], exit_code=gate["exit_code"])


def run_only(
    recipe: Recipe, root: Path, names: Sequence[str], baseline: Baseline, *, told: Callable[[Stage, str], None]
) -> Outcome:
    """The named stages alone, from what stands in the directory. Raises Missing when this machine can't do one."""
    stages = stages_of(recipe, root, baseline)
    known = {stage.name for stage in stages}
    for name in names:
        if name not in known:
            raise BadInput(f"--only {name}: no such stage; there are {', '.join(sorted(known))}")
    chosen = [stage for stage in stages if stage.name in names]
    with locked(root):
        outcome = run(chosen, root, told=told, whole=False)
    if outcome.blocked:
        raise Missing("; ".join(f"stage {name}: {why}" for name, why in outcome.blocked.items()))
    return outcome


def write_script(recipe: Recipe, root: Path, baseline: Baseline) -> tuple[Path, list[StageStatus]]:
    """remaining.sh: the stages that this machine can't do, for one that can, to be run in the same directory.

    Returns its path and the stages in it.
    """
    root.mkdir(parents=True, exist_ok=True)
    stages = stages_of(recipe, root, baseline)
    with locked(root):
        run(stages[:1], root, told=lambda stage, why: None, whole=False)
        planned = {row.stage: row for row in plan_stages(stages, root)}
        wanted = [stage for stage in stages if _elsewhere(stage, planned[stage.name])]
        write_text(root / SCRIPT, _script(recipe, wanted, planned))
        (root / SCRIPT).chmod(0o755)
    return root / SCRIPT, [planned[stage.name] for stage in wanted]


def _elsewhere(stage: Stage, row: StageStatus) -> bool:
    return row.state != "cached" and stage.lack() is not None


def _script(recipe: Recipe, stages: Sequence[Stage], planned: dict[str, StageStatus]) -> str:
    lines = [
        "#!/bin/sh",
        f"# What is left of the release of {recipe.name} and needs a machine with the targets' GPU and libraries.",
        "# Run it there in a copy of this directory (or the directory itself), bring the files back, .stages included,",
        "# and run `corp-deploy release` again: it takes what was made here.",
        "set -eu",
        'cd "$(dirname "$0")"',
        'command -v corp-deploy >/dev/null || { echo "corp-deploy is not installed here" >&2; exit 4; }',
        "",
    ]
    for stage in stages:
        lines += [f"# {stage.name}: {planned[stage.name].why}", str(commands.only(stage.name))]
    return "\n".join([*lines, 'echo "done: bring this directory back and run corp-deploy release again"', ""])
