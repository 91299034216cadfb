"""Releases of a tiny model: files, second runs, rules, kills, baselines, refusals, signatures, other machines."""

import importlib.metadata
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from numpy.typing import NDArray

from calib.store import load_moments
from corp_deploy.commands.doctor import SOURCES
from corp_deploy.invocation.option import Invocation
from corp_deploy.proof import speed
from corp_deploy.release import release_steps, stages, steps
from corp_deploy.release.baseline import Baseline
from corp_deploy.release.check import replay
from corp_deploy.release.incremental import StageDirs
from corp_deploy.release.names import MOMENTS
from corp_deploy.release.recipe import Recipe
from corp_deploy.release.recipe_file import load_recipe
from corp_deploy.release.stages import stages_of
from corp_deploy.release.targets import ReleaseTarget
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.store.manifest import MANIFEST_KIND
from ground.feeds import Feeds
from ground.files import sha256_of_file, write_json
from perf.parity.parity import load_parity
from perf.record.runs import Bench
from perf.runners.onnx import OnnxRunner
from perf.timing.laps import Bound
from tests import tiny
from tests.command import invoked, refuses, run
from tests.histories import bench_of_release
from tests.recipes import RELEASE
from tests.refusals import rejects

ROOT = Path(__file__).parents[1]
MEASURED = {"bench.json", "gate.json", "report.html", "report.md", "report.xml", "MODEL_CARD.md"}
MEASURED |= {"manifest.json", "SHA256SUMS", "sbom.cdx.json", "provenance.json"}
KILLS = 24
PATH = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def release(home: Path, *words: object, expect: int = 0) -> Result:
    return invoked("release", home / "recipe.toml", "-o", home / "out", *words, code=expect)


def output_of(result: Result) -> str:
    """Return the printed text without line breaks and frames."""
    return " ".join(result.output.replace("│", " ").split())


def stages_made(result: Result) -> list[str]:
    found: list[str] = json.loads(result.stdout)["made"]
    return found


def write_inputs(home: Path) -> Path:
    """Write the model and images that the recipe names."""
    np.savez(home / "held-out.npz", images=tiny.images(9, seed=1), labels=np.arange(9) % 7)
    return tiny.written(home, 12, to="calibration.npy")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a release beside its recipe, which tests copy."""
    home = write_inputs(tmp_path_factory.mktemp("release"))
    (home / "recipe.toml").write_text(RELEASE)
    release(home)
    return home


@pytest.fixture
def home(first: Path, tmp_path: Path) -> Path:
    return shutil.copytree(first, tmp_path / "home")


def edit(home: Path, old: str, new: str) -> None:
    text = (home / "recipe.toml").read_text()
    assert old in text, old
    (home / "recipe.toml").write_text(text.replace(old, new))


@pytest.mark.slow("graph")
def test_release_contains_the_documented_files(first: Path) -> None:
    out = first / "out"
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["kind"] == MANIFEST_KIND
    for name in (
        *("recipe.toml", "dense/model.safetensors", "dense/model.onnx", "reduced/config.json", "reduced/model.onnx"),
        *("moments.json", "parity.json", "bench.json", "gate.json", "report.html", "report.md", "report.xml"),
        *("MODEL_CARD.md", "samples/images.npy", "samples/reduced.fp32.npy"),
    ):
        assert manifest["files"][name]["sha256"] == sha256_of_file(out / name), name
    assert manifest["files"]["reduced/config.json"]["made_by"].startswith("corp-deploy reduce --model dense")
    assert manifest["versions"]["torch"]
    assert manifest["lineage"]["preset"] == "best"
    assert json.loads((out / "moments.json").read_text())["sha256"] == sha256_of_file(out / MOMENTS)
    assert str(first) not in (out / "manifest.json").read_text()
    card = (out / "MODEL_CARD.md").read_text()
    assert re.search(r"`dense` made smaller by corp-deploy; images [x\d]+. Architecture: vit_tiny\w+ \(", card), card
    for words in ("blocks.0.mlp", "8 unlabelled images", "lost, held out", "held-out images", "speed-up", "## Limits"):
        assert words in card
    assert not [name for name in manifest["files"] if "effort" in name]
    done = subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=out, capture_output=True, check=False)
    assert done.returncode == 0, done


@pytest.mark.slow("graph")
def test_second_run_rebuilds_nothing_and_reports_it(home: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (home / "out").rglob("*") if path.name != "lock"}
    assert "nothing to do: all 13 stages are up to date" in output_of(release(home))
    assert "nothing to do" in release(home, "--dry-run").stdout
    assert "asked for by --again" in release(home, "--dry-run", "--again", "bench.*").stdout
    after = {path: path.stat().st_mtime_ns for path in (home / "out").rglob("*") if path.name != "lock"}
    assert {path for path in after if before.get(path) != after[path]} <= {
        home / "out" / ".stages",
        home / "out" / ".stages" / "digests.json",
    }
    assert "made recipe, report" in output_of(release(home, "--only", "re[cp]*", "--again", "re[cp]*"))
    assert "nothing to do" in release(home, "--dry-run").stdout
    assert "--again benhc: no such stage; there are" in release(home, "--again", "benhc", expect=2).stderr


@pytest.mark.slow("graph")
def test_changed_rule_reruns_only_the_gate_and_its_reports(home: Path) -> None:
    edit(home, '"params >= dense"', '"params >= dense", "params < 1e9"')
    dry = json.loads(release(home, "--dry-run", "--json").stdout)
    assert {row["stage"]: row["why"] for row in dry["stages"]}["gate"] == "changed: gate.fail_if"
    result = release(home, "--json", expect=1)
    assert stages_made(result) == ["recipe", "gate", "package", "report", "manifest"]
    assert json.loads(result.stdout)["gate"] == "FAIL"
    assert run("check", home / "out").exit_code == 0


@pytest.mark.slow("graph")
def test_failed_release_is_packaged_only_with_allow_failed(home: Path) -> None:
    edit(home, '"params >= dense"', '"params < 1e9"')
    out, started = home / "out", ("--baseline", home / "baseline.json", "--init-baseline")
    message = output_of(release(home, *started, expect=1))
    assert "not packed, because its proof failed: gate.json: FAIL: params < 1e9" in message
    assert not (out / "repository").exists()
    card = (out / "MODEL_CARD.md").read_text()
    assert "This model failed its proof:\n\n* gate.json: FAIL: params < 1e9" in card
    assert "`repository/` was not written." in card
    assert stages_made(release(home, *started, "--json", expect=1)) == []
    edit(home, "[package]\n", "[package]\nallow_failed = true\n")
    assert "not packed" not in output_of(release(home, expect=1))
    assert "was written all the same" in (out / "MODEL_CARD.md").read_text()
    entry = json.loads((out / "repository/expected.json").read_text())["models"]["tiny_cpu"]["1"]
    assert entry["proof"]["parity.json"].startswith("PASS (3 links judged")
    assert entry["proof"]["gate.json"].startswith("FAIL: params < 1e9")
    assert run("check", out).exit_code == 0


@pytest.mark.slow("graph")
def test_check_names_what_differs(home: Path) -> None:
    out = home / "out"
    assert "samples replayed: all as they were made" in output_of(run("check", out))
    (out / "report.md").write_text("better than it was")
    (out / "samples" / "images.npy").unlink()
    result = output_of(invoked("check", out, code=1))
    assert "report.md: sha256" in result
    assert "samples/images.npy: missing" in result
    invoked("check", home, code=2)


@pytest.mark.slow("graph")
def test_check_finds_edited_sums_and_changed_outputs(home: Path) -> None:
    """A file edited together with its line in SHA256SUMS differs from the manifest and from the replay."""
    out = home / "out"
    expected = out / "samples" / "reduced.fp32.npy"
    old = sha256_of_file(expected)
    np.save(expected, np.load(expected) * 1.01)
    (out / "SHA256SUMS").write_text((out / "SHA256SUMS").read_text().replace(old, sha256_of_file(expected)))
    result = output_of(invoked("check", out, code=1))
    assert "samples/reduced.fp32.npy: manifest.json and SHA256SUMS differ" in result
    assert "reduced/model.onnx: relative error" in result


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": 3}, "images: got 3, expected a text"),
        ({"graphs": {"reduced/model.onnx": {"expected": "a.npy"}}}, "the key 'max_relative_error' is missing"),
        ({"kind": "gate"}, "expected a corp-deploy/samples record, got 'gate'"),
        ({}, "the samples can't be read"),
    ],
)
def test_damaged_sample_record_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    record = {"kind": "corp-deploy/samples", "version": 1, "images": "samples/images.npy", "count": 1, "graphs": {}}
    write_json(tmp_path / "samples" / "samples.json", record | changes)
    rejects(re.escape(message), replay, tmp_path)


@pytest.mark.nightly
@pytest.mark.slow("process")
def test_killed_release_resumes_to_equal_bytes(first: Path, tmp_path: Path) -> None:
    """The release is killed at seeded file operations; all files but those with timings are equal byte for byte."""
    home = tmp_path / "home"
    shutil.copytree(first, home, ignore=shutil.ignore_patterns("out"))
    points = [str(random.Random(seed).randint(1, 50 + 8 * seed)) for seed in range(KILLS)]
    words = [sys.executable, "-m", "tests.killing", "release", str(home / "recipe.toml"), str(home / "out"), *points]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    killed = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("killed")]
    assert len(killed) >= 19, done.stdout
    assert len(set(killed)) >= 6, "kills fell into many stages"

    whole, resumed = first / "out", home / "out"
    one, other = ({p.relative_to(base) for p in base.rglob("*") if p.is_file()} for base in (whole, resumed))
    assert one == other
    later = ("digests", "bench.onnxruntime-cpu", "gate", "package", "report", "manifest")
    states = {Path(".stages") / f"{name}.json" for name in later}
    timed = {name for name in one if name.name == "lock" or name.suffix == ".effort"}
    kept = {name for name in one - states - timed if name.as_posix() not in MEASURED}
    same = [name for name in kept if name.parts[0] != "repository"]
    assert len(same) >= 20
    assert [name for name in same if (whole / name).read_bytes() != (resumed / name).read_bytes()] == []
    assert release(home, "--json").exit_code == 0
    assert run("check", home / "out").exit_code == 0


@pytest.mark.slow("models")
def test_baseline_is_requested_started_and_compared(home: Path) -> None:
    edit(home, '"params >= dense"', '"size_bytes > baseline * 1.01"')
    baseline = home / "baseline.json"
    assert "needs --baseline FILE" in release(home, expect=2).stderr
    assert "--init-baseline to start with this one" in release(home, "--baseline", baseline, expect=2).stderr
    assert "--init-baseline needs --baseline" in release(home, "--init-baseline", expect=2).stderr
    started = ("--baseline", baseline, "--init-baseline")
    assert "a record that passes becomes it" in output_of(release(home, *started))
    assert baseline.read_bytes() == (home / "out" / "bench.json").read_bytes()
    assert stages_made(release(home, *started, "--json")) == [], "a record is not compared with itself"
    older = json.loads(baseline.read_text())
    older["subjects"][1]["size_bytes"] //= 2
    baseline.write_text(json.dumps(older))
    assert stages_made(release(home, *started, "--json", expect=1)) == ["gate", "package", "report", "manifest"]


@pytest.mark.slow("graph")
def test_history_stores_the_record_after_its_gate(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = speed.time_models

    def quiet(*where: Any, **how: Any) -> Bench:
        """Time the models, and replace the rounds by those of an idle machine."""
        rows = bench_of_release(0, 2.5, batches=how["batches"]).rows
        return replace(measured(*where, **how), rows=rows)

    monkeypatch.setattr(speed, "time_models", quiet)
    history = home / "history"
    edit(home, "[gate]\n", '[gate]\nhistory = "history"\n')
    release(home)
    rows = json.loads((home / "out/gate.json").read_text())["rules"]
    assert {row["verdict"] for row in rows if row["metric"] == "history"} == {"UNJUDGED"}
    kept, manifest, parity, recipe = sorted(history.iterdir())
    for path, name in ((manifest, "manifest.json"), (parity, "parity.json"), (recipe, "recipe.toml")):
        assert (path.name, path.read_bytes()) == (f"{kept.stem}.{name}", (home / "out" / name).read_bytes())
    assert kept.read_bytes() == (home / "out/bench.json").read_bytes()
    assert json.loads((home / "out/history.json").read_text())["releases"] == [kept.stem]
    assert "Latency over releases" in (home / "out/report.html").read_text()
    (history / "29990101T000000Z-0123456789ab.json").write_text("{}")
    assert stages_made(release(home, "--json")) == []
    edit(home, 'history = "history"', 'history = "out"')
    assert "is the output of this release; give another directory" in output_of(release(home, expect=2))


@pytest.mark.slow("graph")
def test_verdict_is_equal_in_every_file(first: Path) -> None:
    out = first / "out"
    line = "PASS (3 links judged) on 9 images"
    (row,) = [row for row in json.loads((out / "gate.json").read_text())["rules"] if row["metric"] == "parity"]
    assert (row["verdict"], row["message"]) == ("PASS", line)
    for name in ("MODEL_CARD.md", "report.xml", "parity.json"):
        assert line in (out / name).read_text(), name
    for name in ("report.html", "report.md"):
        assert "Parity PASS (3 links judged)" in (out / name).read_text(), name


@pytest.mark.slow("models")
def test_unprovable_limits_are_reported_before_any_stage(home: Path) -> None:
    """If all of nine held-out images agree, the agreement may still be 70 %; a dry run and the release say so."""
    edit(home, "[reduce]", "[reduce]\nridge = 0.0001")  # with this ridge one of the nine images flips
    edit(home, "batches = [1, 3]", "batches = [1, 3]\nmin_agreement = 0.98")
    edit(home, '"params >= dense"', '"params >= dense", "top1_agreement < 0.9", "top1_agreement < 0.1"')
    of_nine = "even 9 of 9 agreeing would leave 70.09 % to 100 % at 95 % confidence; at least"
    dry = output_of(release(home, "--dry-run"))
    assert f"parity.min_agreement 98 % can't be shown by 9 held-out images: {of_nine} 189" in dry
    assert f"rule 'top1_agreement < 0.9': top1_agreement 90 % can't be shown by 9 images: {of_nine} 35" in dry
    assert "< 0.1'" not in dry
    assert "can't be shown by 9 held-out images" in output_of(release(home, expect=3))
    judged = json.loads((home / "out" / "gate.json").read_text())
    assert (judged["verdict"], judged["confidence"]) == ("INCONCLUSIVE", 0.95)
    verdicts = {row["rule"]: row["verdict"] for row in judged["rules"]}
    assert verdicts["parity (parity.json)"] == "INCONCLUSIVE"
    assert verdicts["top1_agreement < 0.1"] == "PASS"
    assert "Gate: **INCONCLUSIVE**" in (home / "out" / "MODEL_CARD.md").read_text()
    edit(home, "min_agreement = 0.98", "min_agreement = 0.98\nconfidence = 0")
    edit(home, '"top1_agreement < 0.1"]', '"top1_agreement < 0.1"]\nconfidence = 0.0')
    alone = release(home, expect=1)
    assert "can't be shown" not in alone.stderr
    assert "88.89 %, limit 98 % (the point alone decides) (1 of 9 images flipped)" in output_of(alone)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files that a recipe names, and unsuitable ones beside them."""
    home = write_inputs(tmp_path_factory.mktemp("wrong"))
    arrays: dict[str, NDArray[Any]] = {
        "small.npy": np.zeros((12, 3, 8, 8), np.float32),
        "three.npy": np.arange(3),
        "beyond.npy": np.arange(9) + 90,
        "shares.npy": np.arange(9.0),
    }
    for name, array in arrays.items():
        np.save(home / name, array)
    (home / "folder").mkdir()
    for name in ("words.txt", "broken.onnx", "broken.npz", "score.py", "folder/words.txt", "tables.latency-table.json"):
        (home / name).write_text("three\nsuch\nwords\n")
    return home


WRONG = [
    ('"calibration.npy"', '"folder"', "calibration.images: {}/folder: no images among 1 files"),
    ('"calibration.npy"', '"small.npy"', "calibration.images: {}/small.npy: got float32 [12, 3, 8, 8], expected"),
    ('"calibration.npy"', '"~/photos"', "/~/photos is not there, or is empty (~ is not expanded in a recipe)"),
    ("hold_out = 4", "samples = 50", "calibration.images: {}/calibration.npy: got 12 images, but 50 samples were"),
    ("hold_out = 4", "hold_out = 12", "calibration.hold_out: hold out: got 12 of 12 images, expected at least 1 and"),
    ("hold_out = 4", "hold_out = 4\nsnapshots = [2, 9]", "calibration.snapshots ends at 9, expected less than 8"),
    ("hold_out = 4", "group_labels = 'three.npy'", "calibration.group_labels: {}/three.npy: 3 labels for 12 images"),
    ("hold_out = 4", "groups = 'folder'", "calibration.groups: groups: the images are in no folders"),
    ('images = "held-out.npz"', 'images = "broken.npz"', "held_out.images: {}/broken.npz: not a valid .npz file"),
    ('labels = "held-out.npz"', 'labels = "three.npy"', "held_out.labels: {}/three.npy: 3 labels for 9 images"),
    ('labels = "held-out.npz"', 'labels = "beyond.npy"', "{}/beyond.npy: labels from 90 to 98, expected 0 to 6"),
    ('labels = "held-out.npz"', 'labels = "shares.npy"', "{}/shares.npy: labels from 0 to 8, expected 0 to 6"),
    ('name = "tiny"', 'name = "tiny"\nlabels = "words.txt"', "{}/words.txt: 3 labels for the model's 7 classes"),
    ("[parity]", "[parity]\nhead = ['broken.onnx']", "parity.head: {}/broken.onnx: a text, "),
    ("[parity]", "[parity]\nmetric = ['nowhere {outputs}']", "parity.metric: metric own: 'nowhere' can't be run"),
    ("[parity]", "[parity]\nmetric = ['python score.py {outputs}']", "names 'score.py', a file beside the"),
    ("mlp = 0.3\nattn = 0.5", "conv = 0.3", "[reduce]: --conv 0.3 has no effect on a model without channels"),
    ("mlp = 0.3", "mlp = 0.3\nmerge_tokens = '1,2,3'", "[reduce]: '1,2,3': expected how many tokens each block"),
    ("mlp = 0.3\nattn = 0.5", "latency = 0.9\nlatency_tables = 'words.txt'", "latency_tables: {}/words.txt is a file"),
    ("mlp = 0.3\nattn = 0.5", "latency = 0.9\nlatency_tables = '.'", "reduce.latency_tables: {}/tables.latency-table"),
    ('["fp32"]', '["fp32", "mixed"]\nkeep_fp32 = ["blocks.77"]', "[export]: keep_fp32: 'blocks.77' fits no module"),
    ('["fp32"]', '["fp32", "int8"]\nrest = "fp32"', "calibration.images, which are 12; write range_samples = 12"),
    ('"dense"', '"folder"', "model.model: {}/folder/config.json: no such file"),
    ('"dense"', '"./words.txt"', "model.model: {}/words.txt is a file, expected the directory of a model"),
    ('"dense"', '"vit_tiny_patch16_224"', "model.weights: the timm model 'vit_tiny_patch16_224' needs the weights"),
    ('"dense"', '"vit_tiny_patch16_224"\nweights = "folder"', "model.weights: {}/folder is a folder, expected a"),
]


@pytest.mark.parametrize(("old", "new", "message"), WRONG)
def test_bad_input_is_refused_before_any_work(
    wrong: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, message: str
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    text = RELEASE.replace(old, new)
    assert text != RELEASE
    (wrong / "recipe.toml").write_text(text)
    words = ("release", wrong / "recipe.toml", "-o", tmp_path / "new", "--trust-code")
    for more in ((), ("--dry-run",), ("--plan-only",)) if (old, new, message) == WRONG[0] else ((),):
        result = invoked(*words, *more, code=2)
        lines = result.stderr.strip().splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith(f"Error: {wrong.resolve() / 'recipe.toml'}: ")
        assert message.replace("{}", str(wrong.resolve())) in lines[0]
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "value", "message", "code"),
    [
        ("ground.outputs.shutil.disk_usage", lambda _: SimpleNamespace(free=1000), "the models and graphs take", 4),
        ("export.graph.to_onnx.MAX_BYTES", 10_000, "export.precisions: the weights take", 2),
    ],
)
def test_results_too_large_for_disk_or_file_are_refused_before_any_work(
    wrong: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, message: str, code: int
) -> None:
    monkeypatch.setattr(name, value)
    (wrong / "recipe.toml").write_text(RELEASE)
    refuses(message, "release", wrong / "recipe.toml", "-o", tmp_path / "new", "--trust-code", code=code)
    assert not (tmp_path / "new").exists()


def test_blocking_folder_is_reported_before_any_work(wrong: Path, tmp_path: Path) -> None:
    (tmp_path / "new" / "dense" / "config.json").mkdir(parents=True)
    (wrong / "recipe.toml").write_text(RELEASE)
    words = ("release", wrong / "recipe.toml", "-o", tmp_path / "new", "--trust-code")
    for more in ((), ("--only", "dense")):
        refuses("new/dense/config.json: a directory, expected a regular file", *words, *more)
    assert not (tmp_path / "new" / ".stages").exists()


def test_several_mistakes_are_reported_together(wrong: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    text = RELEASE.replace("hold_out = 4", "hold_out = 12").replace('labels = "held-out.npz"', 'labels = "three.npy"')
    (wrong / "recipe.toml").write_text(f"{text}labels = 'words.txt'")
    lines = run("release", wrong / "recipe.toml", "-o", tmp_path / "new", "--dry-run").stderr.strip().splitlines()
    keys = ("calibration.hold_out", "held_out.labels", "package.labels")
    assert [f"recipe.toml: {key}: " in line for key, line in zip(keys, lines, strict=True)] == [True] * 3


@pytest.mark.slow("graph")
def test_single_stage_needs_only_its_inputs(home: Path) -> None:
    """A stage checks its own inputs alone, and finished stages don't read theirs again."""
    np.save(home / "three.npy", np.arange(3))
    edit(home, 'labels = "held-out.npz"', 'labels = "three.npy"')
    assert "3 labels for 9 images" in output_of(release(home, "--only", "parity", expect=2))
    assert "nothing to do" in output_of(release(home, "--only", "moments"))
    (home / "calibration.npy").unlink()
    assert "nothing to do" in output_of(release(home, "--only", "export.dense"))
    edit(home, 'labels = "three.npy"', 'labels = "held-out.npz"')
    assert "nothing to do" in output_of(release(home, "--only", "parity"))


PROOF = ("recipe", "dense", "moments", "reduce", "export.dense", "export.reduced", "samples", "parity")


@pytest.mark.slow("graph")
def test_release_is_proved_on_images_its_calibration_held_out(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof uses the held-out groups with their labels, and the printed commands reproduce its files."""
    images = tiny.images(12)
    np.savez(home / "calibration.npz", images=images, labels=np.arange(12) % 7, names=np.arange(12))
    np.save(home / "groups.npy", np.arange(12) // 2)
    grouped = '"calibration.npz"\nhold_out = 3\nseed = 2\ngroup_labels = "groups.npy"'
    edit(home, '"calibration.npy"\nhold_out = 4', grouped)
    edit(home, '[held_out]\nimages = "held-out.npz"\nlabels = "held-out.npz"', '[held_out]\nlabels = "calibration.npz"')
    edit(home, "mlp = 0.3\nattn = 0.5", "macs = 0.8")
    shutil.rmtree(home / "out")
    release(home, *(word for stage in PROOF for word in ("--only", stage)))
    out = home / "out"
    moments = load_moments(out / MOMENTS)
    parity = load_parity(out / "parity.json")
    held_out = load_moments(out / ".stages" / "moments.held-out.safetensors")
    assert parity.images.count == held_out.images == 4, "two groups"
    assert parity.images.digest == held_out.lineage["images"]
    opened = images_for_model(tiny.checkpoint().model, home / "calibration.npz")
    places = [place for place, known in enumerate(torch.isin(opened.ids, held_out.image_ids).tolist()) if known]
    assert not torch.isin(held_out.image_ids, moments.image_ids).any()
    np.testing.assert_array_equal(np.load(out / "samples" / "images.npy"), images[places][:3])
    with torch.inference_mode():
        right = tiny.checkpoint().model(torch.from_numpy(images[places])).argmax(-1).numpy() == np.array(places) % 7
    assert parity.accuracy[0].accuracy == pytest.approx(right.mean())
    commands = {stage.name: stage.command for stage in stages_of(load_recipe(home / "recipe.toml"), out, Baseline())}
    for name, output in {"parity": "parity.json", "reduce": "reduced/config.json"}.items():
        (out / "before").write_bytes((out / output).read_bytes())
        monkeypatch.chdir(out)
        assert run(*shlex.split(commands[name])[1:]).exit_code in (0, 3)
        if name == "parity":
            assert (out / output).read_bytes() == (out / "before").read_bytes()
        else:
            now, before = (json.loads(path.read_text()) for path in (out / output, out / "before"))
            assert (now["sites"], now["weights_sha256"]) == (before["sites"], before["weights_sha256"])


def remove_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("missing_to_build", "missing_to_run"):
        real: Callable[[ReleaseTarget], str | None] = getattr(stages, name)
        monkeypatch.setattr(stages, name, lambda target, real=real: "no GPU" if target.is_engine else real(target))


@pytest.mark.slow("models")
def test_stages_of_another_machine_are_accepted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of the CPU's records stand for a GPU's; the script, the stamps and their acceptance are real."""
    edit(home, "[gate]", "[targets.onnxruntime-cpu]\n[targets.tensorrt]\nfail_if = ['params >= dense']\n[gate]")
    edit(home, '[package]\nname = "tiny"\n', "")
    remove_gpu(monkeypatch)
    result = release(home, expect=4)
    assert "engine.tensorrt: no GPU" in result.stderr
    assert "parity.tensorrt: waits for engine.tensorrt" in result.stderr
    assert "run it where the targets are" in output_of(release(home, "--plan-only"))
    script = (home / "out" / "remaining.sh").read_text()
    lines = [line.split() for line in script.splitlines() if line.startswith("corp-deploy ")]
    names = [words[words.index("--only") + 1] for words in lines]
    assert names == ["engine.tensorrt", "parity.tensorrt", "bench.tensorrt"]
    alone = ("release", home / "out" / "recipe.toml", "-o", home / "out", "--only", names[0], "--trust-paths")
    refuses("stage engine.tensorrt: no GPU", *alone, code=4)

    with monkeypatch.context() as there:
        there.setattr(stages, "missing_to_build", lambda target: None)
        there.setattr(stages, "missing_to_run", lambda target: None)
        play_gpu(there)
        moved = shutil.move(home / "out", home / "elsewhere")
        for words in lines:
            invoked("release", Path(moved) / "recipe.toml", "-o", moved, *words[5:])
        shutil.move(moved, home / "out")
    result = release(home, "--json")
    assert stages_made(result) == ["gate", "report", "manifest"]
    assert not (home / "out" / "repository").exists(), "no longer asked for"
    assert {"engine.tensorrt", "bench.tensorrt"} <= set(json.loads(result.stdout)["cached"])
    rules = [row["rule"] for row in json.loads((home / "out" / "gate.json").read_text())["rules"]]
    own = ["params >= dense", "fitted_images > 0", "tensorrt: params >= dense"]
    assert rules[1:] == ["parity (parity.tensorrt.json)", *own]
    assert (home / "out" / "report.tensorrt.html").is_file()
    assert "reduced/model.tensorrt.plan.json" in (home / "out" / "SHA256SUMS").read_text()


def play_gpu(there: pytest.MonkeyPatch) -> None:
    def engines(place: StageDirs, target: ReleaseTarget, run: Invocation) -> None:
        for subject in ("dense", "reduced"):
            (place.into / subject).mkdir()
            (place.into / subject / "model.tensorrt.plan").write_bytes(b"plan")
            (place.into / subject / "model.tensorrt.plan.json").write_text("{}")

    def parity(place: StageDirs, recipe: Recipe, target: ReleaseTarget) -> None:
        for suffix in ("json", "npz"):
            shutil.copy(place.root / f"parity.{suffix}", place.into / f"parity.{target.name}.{suffix}")

    def bench(place: StageDirs, run: Invocation) -> None:
        shutil.copy(place.root / "bench.json", place.into / run["output"])

    there.setattr(release_steps, "write_engines", engines)
    there.setattr(release_steps, "write_target_parity", parity)
    there.setattr(steps, "write_bench", bench)


@pytest.mark.slow("process")
def test_ci_script_publishes_and_returns_the_gates_exit_code(home: Path) -> None:
    results, summary = home / "results", home / "summary.md"
    environment = os.environ | PATH | {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)}

    def script() -> int:
        words = ("sh", ROOT / "examples" / "ci" / "release.sh", "recipe.toml", "out", "baseline.json", results)
        return subprocess.run(words, cwd=home, env=environment, capture_output=True, check=False).returncode

    assert script() == 0
    assert (home / "baseline.json").is_file()
    assert (results / "report.xml").read_text().startswith("<?xml")
    assert summary.read_text() == (results / "report.md").read_text() + "\n"
    edit(home, "[gate]", "[gate] # a mistake\nfail = 1")
    assert script() == 2


@pytest.mark.parametrize("name", ["github-actions.yml", "gitlab-ci.yml", "container.yml"])
def test_ci_examples_need_nothing_from_this_repository(name: str) -> None:
    text = (ROOT / "examples" / "ci" / name).read_text()
    assert "sh ci/release.sh release.toml" in " ".join(text.replace('"$IMAGE"', "").split())
    assert "release.sh (beside this file) to ci/release.sh" in text
    for own in ("examples/ci", "pip install '.", "docker build", "demo"):
        assert own not in text, own


@pytest.mark.slow("graph")
def test_starter_recipe_is_written_once(home: Path) -> None:
    starter, deit = home / "new.toml", ("release", home / "other.toml", "--init", "deit_tiny_patch16_224")
    invoked("release", starter, "--init", home / "dense")
    invoked("release", starter, "--init", home / "dense", code=2)
    for option in ("--weights", "--images", "--held-out", "--labels"):
        refuses(f"{option} {home / 'nowhere.npy'}: not there, or empty", *deit, option, home / "nowhere.npy")
        assert not (home / "other.toml").exists()
    weights = ("--weights", home / "dense" / "model.safetensors", "--images", home / "calibration.npy")
    invoked(*deit, *weights)
    assert load_recipe(home / "other.toml").model.weights == (home / "dense" / "model.safetensors").resolve()
    refuses("--weights, --images", "release", starter, "-o", home / "new", *weights[:2])
    refuses("calibration.images", "release", starter, "-o", home / "new")
    assert not (home / "new").exists()
    invoked("release", starter, code=2)
    invoked("release", starter, "-o", home / "new", "--dry-run", "--plan-only", code=2)


@pytest.mark.parametrize("shell", SOURCES)
def test_completion_prints_a_script(shell: str) -> None:
    assert "_CORP_DEPLOY_COMPLETE" in output_of(invoked("doctor", "completion", shell))


def test_version_lists_relevant_packages() -> None:
    result = invoked("--version")
    assert [line.split()[0] for line in result.stdout.splitlines()][:3] == ["corp-deploy", "python", "torch"]


# What a release measures


@pytest.mark.slow("graph")
def test_record_without_measurements_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: OnnxRunner, feeds: Feeds) -> Bound:
        raise MemoryError("Failed to allocate memory")

    before = sha256_of_file(home / "out" / "bench.json")
    monkeypatch.setattr(OnnxRunner, "bind", full)
    edit(home, "block_ms = 1", "block_ms = 1.5")
    assert "nothing could be measured" in output_of(release(home, expect=4))
    assert sha256_of_file(home / "out" / "bench.json") == before
    rows = json.loads(release(home, "--dry-run", "--json").stdout)["stages"]
    assert {row["stage"]: row["state"] for row in rows}["bench.onnxruntime-cpu"] == "runs"
    graphs = [home / "out" / name / "model.onnx" for name in ("dense", "reduced")]
    invoked("bench", *graphs, "--batch", 2, "-o", home / "alone.json", code=4)
    assert not (home / "alone.json").exists()


def write_keys(home: Path) -> tuple[Path, Path]:
    """Write a private key and its public key."""
    pytest.importorskip("model_signing", reason="model-signing is not installed: pip install 'corp-deploy[sign]'")
    from cryptography.hazmat.primitives import serialization as how
    from cryptography.hazmat.primitives.asymmetric import ec

    key, private, public = ec.generate_private_key(ec.SECP256R1()), home / "key.pem", home / "key.pub.pem"
    private.write_bytes(key.private_bytes(how.Encoding.PEM, how.PrivateFormat.PKCS8, how.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(how.Encoding.PEM, how.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.mark.slow("models")
def test_passed_release_is_signed_and_stale_signatures_are_removed(home: Path) -> None:
    private, public = write_keys(home)
    out, before = home / "out", sha256_of_file(home / "out" / "manifest.json")
    assert "release.version is missing" in output_of(release(home, "--sign", private, expect=2))
    edit(home, "[model]", '[release]\nname = "tiny"\nversion = "1.0.0"\n[model]')
    assert json.loads(release(home, "--sign", private, "--json").stdout)["signature"] == "signed"
    assert sha256_of_file(out / "manifest.json") != before
    asked = ("--verify", public, "--expect-name", "tiny", "--expect-version", "1.0.0")
    assert "samples replayed: all as they were made; tiny 1.0.0, signed by" in output_of(run("check", out, *asked))
    signature = sha256_of_file(out / "model.sig")
    assert json.loads(release(home, "--sign", private, "--json").stdout)["signature"] == "kept"
    assert json.loads(release(home, "--json").stdout)["signature"] is None
    assert sha256_of_file(out / "model.sig") == signature

    edit(home, '"1.0.0"', '"1.1.0"')
    assert "model.sig is removed: it covered other files" in output_of(release(home))
    assert not (out / "model.sig").exists()
    assert not (out / "provenance.intoto.jsonl").exists()
    assert "this directory is not signed" in output_of(run("check", out, *asked))
    release(home, "--sign", private)
    assert "the signed version is '1.1.0', expected '1.0.0'" in output_of(run("check", out, *asked))
    edit(home, "params >= dense", "params <= dense")
    assert json.loads(release(home, "--sign", private, "--json", expect=1).stdout)["signature"] == "refused"
    assert not (out / "model.sig").exists()
    for words in (("--only", "gate"), ("--dry-run",), ("--plan-only",)):
        assert "--sign signs a whole release" in output_of(release(home, "--sign", private, *words, expect=2))


@pytest.mark.slow("graph")
def test_provenance_names_every_file_and_input(first: Path) -> None:
    out = first / "out"
    statement = json.loads((out / "provenance.json").read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    subjects = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
    files = {path.relative_to(out).as_posix(): path for path in out.rglob("*") if path.is_file()}
    shipped = {name for name in files if not name.startswith(".stages")} - {"SHA256SUMS", "provenance.json"}
    assert subjects == {name: sha256_of_file(files[name]) for name in shipped}
    definition = statement["predicate"]["buildDefinition"]
    inputs = {each["name"]: each["digest"]["sha256"] for each in definition["resolvedDependencies"]}
    assert inputs.keys() == {"model", "calibration.images", "held_out.images", "held_out.labels"}
    assert inputs["calibration.images"] == sha256_of_file(first / "calibration.npy")
    assert inputs["held_out.labels"] == sha256_of_file(first / "held-out.npz")
    assert definition["externalParameters"]["recipe"]["reduce"]["mlp"] == 0.3
    assert statement["predicate"]["runDetails"]["builder"]["version"]["torch"]
    assert str(first) not in (out / "provenance.json").read_text()


@pytest.mark.slow("models")
def test_sbom_is_valid_cyclonedx_with_models_data_and_packages(first: Path) -> None:
    text = (first / "out" / "sbom.cdx.json").read_text()
    bill = json.loads(text)
    model = bill["metadata"]["component"]
    assert model["type"] == "machine-learning-model"
    (graph,) = [each for each in model["components"] if each["name"] == "reduced/model.onnx"]
    assert graph["hashes"] == [{"alg": "SHA-256", "content": sha256_of_file(first / "out" / graph["name"])}]
    parity = json.loads((first / "out" / "parity.json").read_text())
    metrics = model["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
    errors = [float(each["value"]) for each in metrics if each["type"] == "relative error"]
    assert errors == pytest.approx([link["measures"]["relative_error"] for link in parity["links"]], rel=1e-5)
    assert {"top-1 agreement", "accuracy", "speed-up", "release gate"} <= {each["type"] for each in metrics}
    parts = {each["bom-ref"]: each for each in bill["components"]}
    assert parts["data:held-out"]["hashes"][0]["content"] == parity["images"]["digest"]
    torch = next(each for each in bill["components"] if each["name"] == "torch")
    assert torch["version"] == importlib.metadata.version("torch")
    assert torch["licenses"]
    validation = pytest.importorskip("cyclonedx.validation.json", reason="cyclonedx-python-lib is not installed")
    schema = pytest.importorskip("cyclonedx.schema").SchemaVersion.V1_6
    assert validation.JsonStrictValidator(schema).validate_str(text) is None
    broken = text.replace('"type": "machine-learning-model"', '"type": "magic"', 1)
    assert validation.JsonStrictValidator(schema).validate_str(broken) is not None


@pytest.mark.slow("graph")
def test_repository_is_signed_as_a_whole(home: Path) -> None:
    private, public = write_keys(home)
    repository, words = home / "repository", ("--name", "tiny", "--sign", private)
    package = ("package", home / "out", "-o", repository)
    invoked(*package, *words, "--model-version", 3)
    verify = ("check", repository, "--verify", public, "--expect-name", "tiny", "--expect-version")
    assert "tiny 3, signed by the key" in output_of(run(*verify, 3))
    assert "the signed version is '3', expected '4'" in output_of(run(*verify, 4))
    manifest = json.loads((repository / "manifest.json").read_text())
    files = {path.relative_to(repository).as_posix() for path in repository.rglob("*") if path.is_file()}
    assert manifest["files"].keys() == files - {"manifest.json", "model.sig"}

    (repository / "tiny_cpu" / "3" / "libtriton_x.so").write_text("")
    assert "libtriton_x.so: not signed, it was added" in output_of(run(*verify, 3))
    refuses("not signed", *package, *words, "--model-version", 4)
    assert not (repository / "model.sig").exists()
    (repository / "tiny_cpu" / "3" / "libtriton_x.so").unlink()
    (repository / "stray").write_text("")
    refuses("stray: not among the files to sign", *package, *words, "--model-version", 5)
    (repository / "stray").unlink()
    invoked(*package, *words, "--model-version", 6)
    assert "model.sig is removed" in output_of(invoked(*package, "--name", "tiny", "--model-version", 7))
    assert not (repository / "model.sig").exists()


@pytest.mark.slow("models")
def test_only_a_passed_release_becomes_the_baseline(home: Path) -> None:
    """Releases with a failed rule, an inconclusive figure or a failed proof don't become the baseline."""
    baseline = home / "baseline.json"
    started = ("--baseline", baseline, "--init-baseline")
    edit(home, '"params >= dense"', '"size_bytes > baseline * 1.01", "params < dense"')
    release(home, *started, expect=1)
    edit(home, '"params < dense"', '"p99@b2 > 1000"')
    release(home, *started, expect=3)
    edit(home, ', "p99@b2 > 1000"', "")
    edit(home, "max_error = 9.0", "max_error = 0.0")
    release(home, *started, expect=1)
    assert not baseline.exists()
    edit(home, "max_error = 0.0", "min_agreement = 0.0")
    result = release(home, *started)
    assert baseline.read_bytes() == (home / "out" / "bench.json").read_bytes()
    assert "PASS (3 links judged) on 9 images" in output_of(result)
