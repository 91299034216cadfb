"""Every command that is printed beside a file makes that file, run as it stands in a fresh directory on its inputs."""

import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from corp_deploy.demo import run as demo
from corp_deploy.demo.example import EXAMPLES
from corp_deploy.demo.run import DemoScale, itself
from corp_deploy.release.baseline import Baseline
from corp_deploy.release.digests import files_of
from corp_deploy.release.incremental import STATE, Stage
from corp_deploy.release.pipeline import stages_of
from corp_deploy.release.recipe_file import SECTIONS, keys_of, load_recipe
from corp_deploy.store.checkpoint import save
from perf.parity.parity import load_parity
from tests import small_convnets, tiny
from tests.command import invoked

ROOT = Path(__file__).parents[1]
PLAIN = """
[model]
model = "dense"
[calibration]
images = "calibration.npy"
samples = 11
seed = 3
hold_out = 4
batch_size = 4
[held_out]
images = "held-out.npz"
labels = "held-out.npz"
samples = 8
seed = 5
[reduce]
mlp = 0.3
attn = 0.5
align_mlp = 8
align_head = 8
ridge = 3e-4
[export]
precisions = ["fp32"]
[parity]
batches = [1, 3]
half_factor = 6.0
max_error = 0.9
[bench]
batches = [2]
time_limit_s = 0.5
half_width = 0.9
block_ms = 1
min_rounds = 7
threads = 1
[samples]
count = 3
[gate]
fail_if = ["params >= dense", "size_bytes > baseline * 1.01"]
[package]
name = "tiny"
"""
FIRST = ("dense", "moments", "reduce")
TO_WIDTHS = PLAIN[PLAIN.index("[held_out]") : PLAIN.index("mlp = 0.3")]
# The same, but for what some stages do with images, with attention and with precisions.
OTHERWISE = {
    "budget": ("mlp = 0.3\nattn = 0.5\n", "macs = 0.8\n", FIRST),
    "corp": ("mlp = 0.3\nattn = 0.5\n", 'preset = "corp"\nmlp = 0.3\nattn = 0.5\n', FIRST),
    "corp, kept dimensions": (TO_WIDTHS, f'attention_system = "kept"\n{TO_WIDTHS}preset = "corp"\n', FIRST),
    "magnitude": ("attn = 0.5\n", 'preset = "grail"\nselect_mlp = "producer-l2"\n', FIRST),
    "closed loop": ("attn = 0.5\n", "attn = 0.5\nclosed_loop = true\n", FIRST),
    "mixed": ('["fp32"]\n', '["mixed"]\nkeep_fp32 = ["blocks.0.attn"]\n', ("dense", "export.dense")),
}


def given(home: Path, text: str = PLAIN) -> Path:
    home.mkdir(exist_ok=True)
    tiny.written(home, 14, to="calibration.npy", depth=1)
    np.savez(home / "held-out.npz", images=tiny.images(11, seed=1), labels=np.arange(11) % 7)
    (home / "recipe.toml").write_text(text)
    return home


def run_in(directory: Path, words: Iterable[str], monkeypatch: pytest.MonkeyPatch, *, code: int = 0) -> None:
    """As a shell would."""
    program, *rest = words
    assert program == "corp-deploy"
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "argv", [program, *rest])
    invoked(*rest, code=code)


def commands_of(manifest: Path) -> dict[str, list[str]]:
    """Each printed command with the files that it is printed beside."""
    found: dict[str, list[str]] = {}
    for name, entry in json.loads(manifest.read_text())["files"].items():
        found.setdefault(entry["made_by"], []).append(name)
    return found


def copied(source: Path, home: Path, words: list[str], made: list[str]) -> Path:
    """A fresh directory beside what lies outside, with the inputs that the words name, without results and stamps."""
    into = home / source.name
    shutil.copytree(source.parent, home, ignore=shutil.ignore_patterns(source.name))
    for name in dict.fromkeys(re.split("[ ,]", " ".join(words))):
        for path in files_of(source / name):
            relative = path.resolve().relative_to(source.parent)
            stamp = STATE in relative.parts and path.suffix == ".json"
            result = path.relative_to(source).as_posix() in made and path != source / name
            if not (stamp or result):
                (home / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, home / relative)
    into.mkdir(exist_ok=True)
    return into


TIMES = ("created", "rows", "environment", "warnings")


def content(path: Path) -> Any:
    """The bytes; of a measurement, all that it says but the times it took and the state of the machine meanwhile."""
    if path.name != "bench.json":
        return path.read_bytes()
    record = json.loads(path.read_text())
    rows = [
        {key: row[key] for key in ("batch",)} | {"trials": sorted(row["trials"]), "noise": bool(row["noise_blocks"])}
        for row in record["rows"]
    ]
    return {key: value for key, value in record.items() if key not in TIMES} | {"rows": rows}


def reproduced(source: Path, tmp_path: Path, commands: Mapping[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs every command; the files that it is printed beside must come out as they were."""
    for index, (command, made) in enumerate(commands.items()):
        words = shlex.split(command)
        into = copied(source, tmp_path / str(index), words, made)
        failed = words[1] == "verify" and load_parity(source / "parity.json").verdict == "FAIL"
        run_in(into, words, monkeypatch, code=int(failed))
        different = [name for name in made if content(into / name) != content(source / name)]
        assert different == [], command
    return len(commands)


@pytest.mark.slow("graph")
def test_every_command_of_a_release_makes_what_it_stands_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = given(tmp_path / "home")
    whole = ("corp-deploy", "release", "recipe.toml", "-o", "out", "--baseline", "base.json", "--init-baseline")
    run_in(home, whole, monkeypatch)
    out = home / "out"
    (home / "base.json").unlink()
    commands = commands_of(out / "manifest.json")
    assert "" not in commands
    hidden = [".stages/moments.safetensors", ".stages/moments.held-out.safetensors"]
    commands[next(command for command, made in commands.items() if "moments.json" in made)] += hidden
    assert reproduced(out, tmp_path, commands, monkeypatch) >= 10
    for page in ("MODEL_CARD.md", "report.md"):
        text = (out / page).read_text()
        told = [command for command, made in commands.items() if not {"report.md", "sbom.cdx.json"} & {*made}]
        assert [command for command in told if command not in text] == [], page


@pytest.mark.slow("graph")
@pytest.mark.parametrize("name", OTHERWISE)
def test_other_recipes_are_printed_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, names = OTHERWISE[name]
    text = PLAIN.replace(old, new)
    assert text != PLAIN
    text = text.replace("hold_out = 4\n", "") if name == "closed loop" else text
    home = given(tmp_path / "home", text.replace('[package]\nname = "tiny"\n', ""))
    out, recipe = home / "out", load_recipe(home / "recipe.toml")
    only = [word for stage in names for word in ("--only", stage)]
    run_in(home, ("corp-deploy", "release", "recipe.toml", "-o", "out", *only), monkeypatch)
    stages = {stage.name: stage for stage in stages_of(recipe, out, Baseline())}
    commands = {stages[name].command: list(stages[name].outputs) for name in names[1:]}
    reproduced(out, tmp_path, commands, monkeypatch)


@pytest.mark.slow("graph")
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_command_of_the_demo_makes_what_it_stands_beside(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = EXAMPLES[name]
    own = tiny.checkpoint(depth=1) if name == "vit" else small_convnets.checkpoint("resnet18", 32)
    save(own, tmp_path / "example" / example.folder)
    monkeypatch.setattr(demo, "EXAMPLE", tmp_path / "example")
    monkeypatch.setattr(demo, "write_images", small_images)
    monkeypatch.setattr(demo, "SCALE", DemoScale(samples=20, hold_out=5, batches=(2,), time_limit=0.5))
    home = tmp_path / "home"
    (home / "demo-out").mkdir(parents=True)
    run_in(home / "demo-out", itself(example).argv, monkeypatch)
    commands = commands_of(home / "demo-out" / "manifest.json")
    assert "" not in commands
    assert commands.pop(str(itself(example))), "it has just made these in a fresh directory"
    assert reproduced(home / "demo-out", tmp_path, commands, monkeypatch) == 7
    assert "--hold-out 5 " in (home / "demo-out" / "report.html").read_text()
    effects = json.loads((home / "demo-out" / "effects.json").read_text())["rows"]
    assert [row["preset"] for row in effects] == [*example.beside, "best"]


def small_images(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    np.savez(directory / "calibration.npz", images=tiny.images(24))
    np.savez(directory / "held-out.npz", images=tiny.images(10, seed=1), labels=np.arange(10) % 7)


CORP: dict[str, object] = {"reduce.preset": "corp"}
MERGED: dict[str, object] = {"reduce.merge_tokens": "3"}
LATENCY: dict[str, object] = {
    "reduce.mlp": None,
    "reduce.attn": None,
    "reduce.latency": 0.8,
    "reduce.latency_tables": "tables",
}
HEAD: dict[str, object] = {"parity.head": ["head.onnx"]}
# Another value for every key of a recipe, with what must hold before and after for it to mean something.
INT8: dict[str, object] = {"export.precisions": ["fp32", "int8"], "package.name": None}
CHANGES: dict[str, tuple[object, dict[str, object]]] = {
    "calibration.samples": (9, {}),
    "calibration.seed": (7, {}),
    "calibration.batch_size": (5, {}),
    "calibration.device": ("cuda", {}),
    "calibration.workers": (1, {}),
    "calibration.max_bad": (2, {}),
    "calibration.hold_out": (3, {}),
    "calibration.groups": ("image", {}),
    "calibration.snapshots": ([5], {"calibration.snapshots": [4]}),
    "calibration.attention_system": ("kept", CORP),
    "held_out.samples": (7, {}),
    "held_out.seed": (8, {}),
    "reduce.preset": ("vbp", {"reduce.attn": None}),
    "reduce.mlp": (0.4, {}),
    "reduce.attn": (0.6, {}),
    "reduce.conv": (0.6, {}),
    "reduce.residual": (0.6, {}),
    "reduce.macs": (0.7, {"reduce.mlp": None, "reduce.attn": None, "reduce.macs": 0.8}),
    "reduce.params": (0.7, {"reduce.mlp": None, "reduce.attn": None, "reduce.params": 0.8}),
    "reduce.latency": (0.7, LATENCY | {"reduce.latency": 0.8}),
    "reduce.batch": (8, LATENCY),
    "reduce.select": ("active", {}),
    "reduce.repair": ("gram", {}),
    "reduce.repair_mlp": ("bias", {}),
    "reduce.repair_conv": ("gram", {"reduce.conv": 0.5}),
    "reduce.repair_heads": ("none", {"reduce.whole_heads": 0.5}),
    "reduce.qk": ("logit-v1", {}),
    "calibration.active_eps": (0.01, {}),
    "reduce.select_mlp": ("wanda", CORP),
    "reduce.select_head": ("magnitude", CORP),
    "reduce.select_conv": ("magnitude", CORP | {"reduce.conv": 0.5}),
    "reduce.heads": ("ragged", {}),
    "reduce.align_mlp": (16, {}),
    "reduce.align_head": (16, {}),
    "reduce.align_conv": (16, {}),
    "reduce.ridge": (1e-3, {}),
    "reduce.allow_partial": (True, {}),
    "reduce.most_cut": (0.9, {"reduce.mlp": None, "reduce.attn": None, "reduce.macs": 0.8}),
    "reduce.save_as": ("hf", {}),
    "reduce.reads": ("all", {"reduce.closed_loop": True, "calibration.hold_out": None}),
    "reduce.rescale": (True, {}),
    "reduce.rotate": (False, {}),
    "reduce.whole_heads": (0.5, {}),
    "reduce.select_heads": ("magnitude", {"reduce.whole_heads": 0.5}),
    "reduce.closed_loop": (True, {"calibration.hold_out": None}),
    "reduce.effort": ("standard", {"calibration.hold_out": None}),
    "reduce.within": ("error 0.5", {"reduce.mlp": None, "reduce.attn": None, "reduce.within": "error 0.4"}),
    "reduce.merge_tokens": ("2", {}),
    "reduce.merge_metric": ("keys", MERGED),
    "reduce.merge_how": ("drop", MERGED),
    "reduce.merge_outputs": ("unmerged", MERGED),
    "reduce.sparse": ("mlp=2:4", {}),
    "reduce.sparse_pattern": ("cast", {"reduce.sparse": "2:4"}),
    "reduce.sparse_permute": ("inside", {"reduce.sparse": "2:4"}),
    "reduce.polish": ("block", {"reduce.polish": "model", "reduce.polish_steps": 2}),
    "reduce.polish_steps": (3, {"reduce.polish": "model", "reduce.polish_steps": 2}),
    "reduce.polish_time": (0.2, {"reduce.polish": "model", "reduce.polish_time": 0.1}),
    "export.precisions": (["fp32", "fp16"], {}),
    "export.keep_fp32": (
        ["blocks.0.*"],
        {"export.precisions": ["mixed"], "export.keep_fp32": ["blocks.0.attn"]} | {"package.name": None},
    ),
    "export.input": ("uint8", {}),
    "export.rest": ("fp32", INT8 | {"export.precisions": ["fp32", "fp16", "int8"]}),
    "export.scales": ("max", INT8),
    "export.balance": (False, INT8),
    "export.keep_rest": (["blocks.0"], INT8),
    "export.weight_bits": (7, INT8),
    "export.range_samples": (7, INT8),
    "export.break_fusion": (["blocks.0.attn"], {}),
    "parity.batches": ([2], {}),
    "parity.min_agreement": (0.5, {}),
    "parity.max_error": (0.8, {}),
    "parity.confidence": (0.8, {"parity.min_agreement": 0.5}),
    "parity.half_factor": (7.0, {}),
    "parity.quantised_factor": (3.0, {}),
    "parity.max_apart": (0.3, {}),
    "parity.metric": ([f"first={sys.executable} -c 'print(1)' {{outputs}}"], {}),
    "parity.map_threshold": (0.0, HEAD),
    "parity.max_map_error": (0.4, HEAD),
    "parity.min_iou": (0.6, HEAD),
    "parity.min_pixels": (0.7, HEAD),
    "bench.batches": ([3], {}),
    "bench.time_limit_s": (2.5, {}),
    "bench.half_width": (0.8, {}),
    "bench.block_ms": (2.0, {}),
    "bench.min_rounds": (8, {}),
    "bench.threads": (2, {}),
    "bench.audit": (True, {}),
    "gate.fail_if": (["params > dense"], {}),
    "gate.confidence": (0.8, {}),
    "package.name": ("other", {}),
}
# Said by the recipe alone: the stages that these are for are run as `release recipe.toml --only`.
BY_RECIPE = ("release", "model", "samples", "licences")
# Files outside; what stands in them counts, and not what they are called.
FILES = ("images", "labels", "group_labels", "head", "latency_tables", "history", "metric_files")
# What makes no difference to the result.
IDLE = ("calibration.workers",)


def stages_with(folder: Path, changes: Mapping[str, object]) -> dict[str, Stage]:
    tables = tomllib.loads(PLAIN)
    for name, value in changes.items():
        table, key = name.split(".")
        tables[table] = {word: each for word, each in {**tables[table], key: value}.items() if each is not None}
    (folder / "recipe.toml").write_text(tomli_w.dumps(tables))
    baseline = Baseline(path=folder / "base.json", init=True)
    return {stage.name: stage for stage in stages_of(load_recipe(folder / "recipe.toml"), folder / "out", baseline)}


def decides(stage: Stage) -> dict[str, object]:
    """Everything that a stage's stamp holds but for versions, the commands of others and what these made."""
    told = {key: value for key, value in stage.settings.items() if key not in ("versions", "commands", "recipe")}
    return told | dict.fromkeys(stage.outside)


@pytest.mark.slow("models")
def test_no_key_of_a_recipe_is_missing_from_the_commands(tmp_path: Path) -> None:
    """What decides a stage's result is in its command, and what is in its command decides the stage."""
    keys = {f"{table}.{key}" for table, known in SECTIONS.items() if table not in BY_RECIPE for key in keys_of(known)}
    assert {key for key in keys if key.split(".")[1] not in FILES} == CHANGES.keys()
    for key, (value, companions) in CHANGES.items():
        before, after = (stages_with(tmp_path, companions | own) for own in ({}, {key: value}))
        assert before.keys() == after.keys(), key
        printed = [name for name in before if before[name].command != after[name].command]
        decided = [name for name in before if decides(before[name]) != decides(after[name])]
        itself = [name for name in before if "--only" in before[name].command]
        assert printed, key
        assert set(decided) - {*itself} <= {*printed}, key
        read = [name for name in before if before[name].reads != after[name].reads]
        assert set(printed) <= {*decided, *read} or key in IDLE, key


@pytest.mark.parametrize(("taken", "follows"), [("kept", True), ("whole", False), (None, False)])
def test_only_a_system_of_kept_dimensions_follows_the_widths(tmp_path: Path, taken: str | None, follows: bool) -> None:
    given = {**CORP, "calibration.attention_system": taken}
    before = stages_with(tmp_path, given)["moments"]
    for change in ({"reduce.attn": 0.6}, {"reduce.align_head": 16}):
        after = stages_with(tmp_path, given | change)["moments"]
        assert (decides(after) != decides(before)) == follows
        assert (after.command != before.command) == follows


def test_the_whole_system_is_taken_unless_said_otherwise(tmp_path: Path) -> None:
    one, other = (
        stages_with(tmp_path, {**CORP, "calibration.attention_system": taken})["moments"] for taken in (None, "whole")
    )
    assert decides(one) == decides(other)
    assert one.command == other.command
    assert "--attention-system " in one.command
    assert "--attn" not in one.command
