"""Commands printed beside files: each one, run unchanged in a fresh directory with its inputs, makes its files."""

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
from corp_deploy.demo.run import EXAMPLES, DemoScale, demo_invocation
from corp_deploy.release.baseline import Baseline
from corp_deploy.release.digests import files_of
from corp_deploy.release.incremental import STATE, Stage
from corp_deploy.release.recipe import SECTIONS
from corp_deploy.release.recipe_file import load_recipe
from corp_deploy.release.recipe_keys import keys_of
from corp_deploy.release.stages import stages_of
from corp_deploy.store.checkpoint import save
from perf.parity.parity import load_parity
from tests import small_convnets, tiny
from tests.command import invoked

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
# Replacements in PLAIN that change how stages use images, attention and precisions, with the stages to run.
VARIANTS = {
    "budget": ("mlp = 0.3\nattn = 0.5\n", "macs = 0.8\n", FIRST),
    "corp": ("mlp = 0.3\nattn = 0.5\n", 'preset = "corp"\nmlp = 0.3\nattn = 0.5\n', FIRST),
    "corp, kept dimensions": (TO_WIDTHS, f'attention_system = "kept"\n{TO_WIDTHS}preset = "corp"\n', FIRST),
    "magnitude": ("attn = 0.5\n", 'preset = "grail"\nselect_mlp = "producer-l2"\n', FIRST),
    "closed loop": ("attn = 0.5\n", "attn = 0.5\nclosed_loop = true\n", FIRST),
    "mixed": ('["fp32"]\n', '["mixed"]\nkeep_fp32 = ["blocks.0.attn"]\n', ("dense", "export.dense")),
}


def write_release_inputs(home: Path, text: str = PLAIN) -> Path:
    home.mkdir(exist_ok=True)
    tiny.written(home, 14, to="calibration.npy", depth=1)
    np.savez(home / "held-out.npz", images=tiny.images(11, seed=1), labels=np.arange(11) % 7)
    (home / "recipe.toml").write_text(text)
    return home


def run_in(directory: Path, words: Iterable[str], monkeypatch: pytest.MonkeyPatch, *, code: int = 0) -> None:
    """Run a corp-deploy command line in a directory, as a shell would."""
    program, *rest = words
    assert program == "corp-deploy"
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "argv", [program, *rest])
    invoked(*rest, code=code)


def commands_of(manifest: Path) -> dict[str, list[str]]:
    """Return each printed command with the files that it is printed beside."""
    found: dict[str, list[str]] = {}
    for name, entry in json.loads(manifest.read_text())["files"].items():
        found.setdefault(entry["made_by"], []).append(name)
    return found


def copied(source: Path, home: Path, words: list[str], made: list[str]) -> Path:
    """Copy the source's surroundings and the inputs that the words name, without results and stamps."""
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
    """Return a file's bytes, or a measurement's record without times and the machine's state."""
    if path.name != "bench.json":
        return path.read_bytes()
    record = json.loads(path.read_text())
    # The time that is left decides whether noise is measured too.
    rows = [{"batch": row["batch"], "trials": sorted(row["trials"])} for row in record["rows"]]
    return {key: value for key, value in record.items() if key not in TIMES} | {"rows": rows}


def reproduced(source: Path, tmp_path: Path, commands: Mapping[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run every command, require that its files come out the same, and return the number of commands."""
    for index, (command, made) in enumerate(commands.items()):
        words = shlex.split(command)
        into = copied(source, tmp_path / str(index), words, made)
        failed = words[1] == "verify" and load_parity(source / "parity.json").verdict == "FAIL"
        run_in(into, words, monkeypatch, code=int(failed))
        different = [name for name in made if content(into / name) != content(source / name)]
        assert different == [], command
    return len(commands)


@pytest.mark.slow("graph")
def test_printed_release_commands_reproduce_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = write_release_inputs(tmp_path / "home")
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
        shown = [command for command, made in commands.items() if not {"report.md", "sbom.cdx.json"} & {*made}]
        assert [command for command in shown if command not in text] == [], page


@pytest.mark.slow("graph")
@pytest.mark.parametrize("name", VARIANTS)
def test_other_recipes_are_printed_completely(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, names = VARIANTS[name]
    text = PLAIN.replace(old, new)
    assert text != PLAIN
    text = text.replace("hold_out = 4\n", "") if name == "closed loop" else text
    home = write_release_inputs(tmp_path / "home", text.replace('[package]\nname = "tiny"\n', ""))
    out, recipe = home / "out", load_recipe(home / "recipe.toml")
    only = [word for stage in names for word in ("--only", stage)]
    run_in(home, ("corp-deploy", "release", "recipe.toml", "-o", "out", *only), monkeypatch)
    stages = {stage.name: stage for stage in stages_of(recipe, out, Baseline())}
    commands = {stages[name].command: list(stages[name].outputs) for name in names[1:]}
    reproduced(out, tmp_path, commands, monkeypatch)


@pytest.mark.slow("graph")
@pytest.mark.parametrize("name", EXAMPLES)
def test_printed_demo_commands_reproduce_their_files(
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
    run_in(home / "demo-out", demo_invocation(example).argv, monkeypatch)
    commands = commands_of(home / "demo-out" / "manifest.json")
    assert "" not in commands
    assert commands.pop(str(demo_invocation(example))), "run_in has just run it in a fresh directory"
    assert reproduced(home / "demo-out", tmp_path, commands, monkeypatch) == 7
    assert "--hold-out 5 " in (home / "demo-out" / "report.html").read_text()
    effects = json.loads((home / "demo-out" / "effects.json").read_text())["rows"]
    assert [row["preset"] for row in effects] == [*example.beside, "best"]


def small_images(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    np.savez(directory / "calibration.npz", images=tiny.images(24))
    np.savez(directory / "held-out.npz", images=tiny.images(10, seed=1), labels=np.arange(10) % 7)


Changes = dict[str, tuple[object, dict[str, object]]]


def changes(table: str, before: dict[str, object] | None = None, **values: object) -> Changes:
    """Map keys to another value and to the values of other keys that it needs before and after."""
    return {f"{table}.{key}": (value, before or {}) for key, value in values.items()}


CORP: dict[str, object] = {"reduce.preset": "corp"}
MERGED: dict[str, object] = {"reduce.merge_tokens": "3"}
SHARES: dict[str, object] = {"reduce.mlp": None, "reduce.attn": None}
LATENCY = SHARES | {"reduce.latency": 0.8, "reduce.latency_tables": "tables"}
WHOLE: dict[str, object] = {"reduce.whole_heads": 0.5}
SPARSE: dict[str, object] = {"reduce.sparse": "2:4"}
POLISH: dict[str, object] = {"reduce.polish": "layer", "reduce.polish_steps": 2}
LOOP: dict[str, object] = {"calibration.hold_out": None}
HEAD: dict[str, object] = {"parity.head": ["head.onnx"]}
INT8: dict[str, object] = {"export.precisions": ["fp32", "int8"], "package.name": None}
MIXED: dict[str, object] = {"export.precisions": ["mixed"], "export.keep_fp32": ["blocks.0.attn"], "package.name": None}
COUNTED = f"first={sys.executable} -c 'print(1)' {{outputs}}"
CHANGES: Changes = (
    changes("calibration", samples=9, seed=7, batch_size=5, device="cuda", workers=1, max_bad=2, hold_out=3)
    | changes("calibration", groups="image", active_eps=0.01)
    | changes("calibration", {"calibration.snapshots": [4]}, snapshots=[5])
    | changes("calibration", CORP, attention_system="kept")
    | changes("held_out", samples=7, seed=8)
    | changes("reduce", mlp=0.4, attn=0.6, conv=0.6, residual=0.6, select="active", repair="gram", repair_mlp="bias")
    | changes("reduce", qk="logit-v1", heads="ragged", align_mlp=16, align_head=16, align_conv=16, ridge=1e-3)
    | changes("reduce", allow_partial=True, save_as="hf", rescale=True, rotate=False, whole_heads=0.5)
    | changes("reduce", merge_tokens="2", sparse="mlp=2:4")
    | changes("reduce", {"reduce.attn": None}, preset="vbp")
    | changes("reduce", SHARES | {"reduce.macs": 0.8}, macs=0.7, most_cut=0.9)
    | changes("reduce", SHARES | {"reduce.params": 0.8}, params=0.7)
    | changes("reduce", SHARES | {"reduce.within": "error 0.4"}, within="error 0.5")
    | changes("reduce", LATENCY, latency=0.7, batch=8)
    | changes("reduce", {"reduce.conv": 0.5}, repair_conv="gram")
    | changes("reduce", CORP, select_mlp="wanda", select_head="magnitude")
    | changes("reduce", CORP | {"reduce.conv": 0.5}, select_conv="magnitude")
    | changes("reduce", WHOLE, repair_heads="none", select_heads="magnitude")
    | changes("reduce", LOOP, closed_loop=True, effort="standard")
    | changes("reduce", LOOP | {"reduce.closed_loop": True}, reads="all")
    | changes("reduce", MERGED, merge_metric="keys", merge_how="drop", merge_outputs="unmerged")
    | changes("reduce", SPARSE, sparse_pattern="cast", sparse_permute="inside")
    | changes("reduce", {"reduce.polish": "layer"}, polish="none")
    | changes("reduce", POLISH, polish_steps=3)
    | changes("reduce", {"reduce.polish": "layer", "reduce.polish_time": 0.1}, polish_time=0.2)
    | changes("export", precisions=["fp32", "fp16"], input="uint8", break_fusion=["blocks.0.attn"])
    | changes("export", MIXED, keep_fp32=["blocks.0.*"])
    | changes("export", INT8 | {"export.precisions": ["fp32", "fp16", "int8"]}, rest="fp32")
    | changes("export", INT8, scales="max", balance=False, keep_rest=["blocks.0"], weight_bits=7, range_samples=7)
    | changes("parity", batches=[2], min_agreement=0.5, max_error=0.8, half_factor=7.0, quantised_factor=3.0)
    | changes("parity", max_apart=0.3, metric=[COUNTED], output_limit=["logits:max_error=0.7"], logit_threshold=0.5)
    | changes("parity", exclude_output=["aux"])
    | changes("parity", {"parity.min_agreement": 0.5}, confidence=0.8)
    | changes("parity", HEAD, map_threshold=0.0, max_map_error=0.4, min_iou=0.6, min_pixels=0.7)
    | changes(
        "bench",
        batches=[3],
        time_limit_s=2.5,
        half_width=0.8,
        block_ms=2.0,
        min_rounds=8,
        launches=2,
        threads=2,
        audit=True,
        energy_time_s=9.0,
    )
    | changes("gate", fail_if=["params > dense"], confidence=0.8)
    | changes("package", name="other", allow_failed=True)
)
# Keys of these tables stand in the recipe alone: their stages run as `release recipe.toml --only`.
BY_RECIPE = ("release", "model", "samples", "licences")
# Files outside the recipe count by their content, not by their name.
FILES = ("images", "labels", "group_labels", "head", "latency_tables", "history", "metric_files")
# Keys without an effect on the result.
IDLE = ("calibration.workers",)


def stages_with(folder: Path, changes: Mapping[str, object]) -> dict[str, Stage]:
    tables = tomllib.loads(PLAIN)
    for name, value in changes.items():
        table, key = name.split(".")
        tables[table] = {word: each for word, each in {**tables[table], key: value}.items() if each is not None}
    (folder / "recipe.toml").write_text(tomli_w.dumps(tables))
    baseline = Baseline(path=folder / "base.json", init=True)
    return {stage.name: stage for stage in stages_of(load_recipe(folder / "recipe.toml"), folder / "out", baseline)}


def inputs_of(stage: Stage) -> dict[str, object]:
    """Return the content of a stage's stamp, without versions and other stages' commands and files."""
    settings = {key: value for key, value in stage.settings.items() if key not in ("versions", "commands", "recipe")}
    return settings | dict.fromkeys(stage.outside)


@pytest.mark.slow("models")
def test_every_recipe_key_appears_in_the_commands(tmp_path: Path) -> None:
    """A stage's command changes exactly if the stage's inputs change."""
    keys = {f"{table}.{key}" for table, known in SECTIONS.items() if table not in BY_RECIPE for key in keys_of(known)}
    assert {key for key in keys if key.split(".")[1] not in FILES} == CHANGES.keys()
    for key, (value, companions) in CHANGES.items():
        before, after = (stages_with(tmp_path, companions | own) for own in ({}, {key: value}))
        assert before.keys() == after.keys(), key
        printed = [name for name in before if before[name].command != after[name].command]
        decided = [name for name in before if inputs_of(before[name]) != inputs_of(after[name])]
        itself = [name for name in before if "--only" in before[name].command]
        assert printed, key
        assert set(decided) - {*itself} <= {*printed}, key
        read = [name for name in before if before[name].reads != after[name].reads]
        assert set(printed) <= {*decided, *read} or key in IDLE, key


@pytest.mark.parametrize(("taken", "follows"), [("kept", True), ("whole", False), (None, False)])
def test_only_a_restricted_system_depends_on_the_widths(tmp_path: Path, taken: str | None, follows: bool) -> None:
    system = {**CORP, "calibration.attention_system": taken}
    before = stages_with(tmp_path, system)["moments"]
    for change in ({"reduce.attn": 0.6}, {"reduce.align_head": 16}):
        after = stages_with(tmp_path, system | change)["moments"]
        assert (inputs_of(after) != inputs_of(before)) == follows
        assert (after.command != before.command) == follows


def test_full_system_is_the_default(tmp_path: Path) -> None:
    systems = ({**CORP, "calibration.attention_system": system} for system in (None, "whole"))
    one, other = (stages_with(tmp_path, changes)["moments"] for changes in systems)
    assert inputs_of(one) == inputs_of(other)
    assert one.command == other.command
    assert "--attention-system " in one.command
    assert "--attn" not in one.command
