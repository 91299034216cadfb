"""Users' own metrics: runs on each candidate's outputs, records, use in gates and releases, and refusals."""

import json
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from corp_deploy.proof import chain
from corp_deploy.proof.custom_metrics import Meter, metric_from_text, metrics_from_texts
from corp_deploy.proof.proof_inputs import ProofInputs
from corp_deploy.store.checkpoint import save
from corp_deploy.store.onnx_file import export_checkpoint
from perf.gate.evidence import Evidence
from perf.gate.gate import judge
from perf.gate.rule import rule_from_text
from perf.parity.labels import OwnMetric
from perf.parity.parity import load_parity
from tests import tiny
from tests.command import invoked, refuses, run
from tests.refusals import rejects
from tests.test_corp_printed import PLAIN

SCORE = """\
import sys
import numpy as np
with np.load(sys.argv[1]) as file:
    right = file["logits"].argmax(1) == file["labels"]
    assert len(file["names"]) == len(right), file["names"]
print("reading", sys.argv[1])
print(right.mean())
with open("runs.txt", "a") as log:
    print(len(right), file=log)
"""
QUIET = SCORE.partition("with open")[0]
"""The script without its log, which `check` would report in a release."""
VERIFY = ("verify", "dense", "reduced", "--images", "images.npz", "-o", "parity.json")
LOGITS = {"logits": np.arange(12, dtype=np.float32).reshape(4, 3)}
INPUTS = ProofInputs(feeds={"images": np.zeros((4, 1), dtype=np.float32)}, digest="0", names=("a", "b", "c", "d"))


def python(code: str) -> str:
    return shlex.join([sys.executable, "-c", code, "{outputs}"])


def row_of(command: str, inputs: ProofInputs = INPUTS, **more: Any) -> OwnMetric:
    meter = Meter([metric_from_text(command)], inputs, **more)
    meter.measure("one", LOGITS)
    return meter.metrics[0]


def value_of(command: str, **more: Any) -> float:
    return row_of(command, **more).value


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    for name, seed in (("dense", 0), ("reduced", 1)):
        checkpoint = tiny.checkpoint(seed=seed, depth=1)
        save(checkpoint, models / name)
    export_checkpoint(checkpoint, models / "reduced" / "model.onnx", precision="fp32")
    np.savez(models / "images.npz", images=tiny.images(9), labels=np.arange(9) % 7)
    (models / "score.py").write_text(SCORE)
    return models


@pytest.fixture
def home(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(models, tmp_path, dirs_exist_ok=True))


def logits_of(seed: int) -> NDArray[Any]:
    """Compute the logits of the dense (0) or reduced (1) model on the images in images.npz."""
    return tiny.ran(tiny.checkpoint(seed=seed, depth=1).model, tiny.images(9)).numpy()


@pytest.mark.slow("graph")
def test_custom_metric_is_judged_against_the_dense_model(home: Path) -> None:
    command = f"hits={sys.executable} score.py {{outputs}}"
    result = run("verify", "dense", "reduced", "reduced/model.onnx", "--images", "images.npz", "--labels", "images.npz",
                 "-o", "parity.json", "--metric", command, "--max-error", 9)  # fmt: skip
    assert result.exit_code == 0, result.output
    parity = load_parity(home / "parity.json")
    dense, reduced = (float(np.mean(logits_of(seed).argmax(1) == np.arange(9) % 7)) for seed in (0, 1))
    assert [row.value for row in parity.metrics] == pytest.approx([dense, reduced, reduced])
    assert (home / "runs.txt").read_text().split() == ["9"] * 3, "it runs once for each candidate"
    assert f"hits of dense torch fp32: {dense:.6g}" in result.output
    before = parity.metrics[0].sha256
    (home / "score.py").write_text(SCORE + "\n")
    assert row_of(command, _labelled()).sha256 != before, "the digest covers the script"

    def verdict(rule: str) -> str:
        return judge([rule_from_text(rule)], Evidence(parity=parity)).verdict

    assert verdict(f"metric.hits < {reduced + 0.01}") == "FAIL"
    assert verdict(f"metric.hits < {reduced - 0.01}") == "PASS"
    assert verdict("metric.hits@reduced < -1") == "PASS"
    assert verdict(f"dense.metric.hits < {dense + 0.01}") == "FAIL"
    assert verdict(f"metric.hits < dense {signed(reduced - dense + 0.01)}") == "FAIL"
    assert verdict(f"metric.hits < dense {signed(reduced - dense - 0.01)}") == "PASS"
    rejects(r"no measure 'misses' of your own, it has hits; give verify --metric misses=", verdict, "metric.misses < 1")
    rejects("not for 'other'", verdict, "other.metric.hits < 1")
    invoked("gate", "parity.json", "--fail-if", "metric.hits < 2", code=1)


def signed(gap: float) -> str:
    """Format a gap as rules write the term that is added to a bound."""
    return f"{'-' if gap < 0 else '+'} {abs(gap):.6f}"


def _labelled() -> ProofInputs:
    return ProofInputs(feeds=INPUTS.feeds, digest="0", names=INPUTS.names, labels=np.zeros(4, dtype=np.int64))


def test_metric_function_runs_only_if_trusted(home: Path) -> None:
    code = "def mean(outputs):\n    open('ran', 'w').close()\n    return outputs['logits'].mean()\n"
    (home / "own.py").write_text(code)
    refuses("own.py is code, which would be run to measure outputs", *VERIFY, "--metric", "mean=module:own.py:mean")
    assert not (home / "ran").exists()
    invoked(*VERIFY, "--metric", "mean=module:own.py:mean", "--trust-code", "--max-error", 9)
    expected = float(logits_of(0).mean())
    assert load_parity(home / "parity.json").metrics[0].value == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print('0.5 mAP')", "the last line is '0.5 mAP', expected a number and nothing else"),
        ("pass", "printed nothing, expected one number, or one for each input on the last line"),
        ("print('nan')", "gives 'nan', expected finite numbers"),
        ("print('inf')", "gives 'inf', expected finite numbers"),
        ("raise SystemExit('no labels')", r"exit code 1, expected 0 \(the file holds logits, names\): no labels"),
        ("print(1); raise SystemExit(3)", r"exit code 3, expected 0 \(the file holds logits, names\): it said nothing"),
    ],
)
def test_metric_without_a_number_is_refused(code: str, says: str) -> None:
    rejects(f"metric own of one: {says}", value_of, python(code))


def test_metric_command_uses_no_shell_and_sees_only_outputs(tmp_path: Path) -> None:
    code = "import sys, numpy as np; f = np.load(sys.argv[1]); print(sorted(f.files)); print(f['logits'].sum())"
    assert value_of(python(code)) == 66.0
    look = "import os, sys; print(oct(os.stat(os.path.dirname(sys.argv[1])).st_mode & 0o777)[2:])"
    assert value_of(python(look)) == 700.0
    behind = shlex.join([sys.executable, "-c", "import sys; print(len(sys.argv))", "{outputs}"]) + " && exit 3"
    assert value_of(behind, below=tmp_path) == 5.0, "&& is an argument like others"
    rejects("'no-such-program' can't be run: there is no such program", value_of, "no-such-program {outputs}")
    own = tmp_path / "own.sh"
    own.write_text("#!/bin/sh\necho 7\n")
    rejects(r"'\./own.sh' can't be run: there is no such program", value_of, "./own.sh {outputs}", below=tmp_path)
    own.chmod(0o755)
    assert value_of("./own.sh {outputs}", below=tmp_path) == 7.0


def test_failing_metric_command_ends_the_proof_early(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain.Chain, "_step", lambda *_: pytest.fail("a candidate was run"))
    message = "metric own of dense torch fp32: exit code 1, expected 0 (the file holds logits, names)"
    refuses(message, *VERIFY, "--metric", "false {outputs}")
    missing = ("--metric", "module:nowhere.py:mean", "--trust-code")
    refuses("metric own: nowhere.py can't be read", *VERIFY, *missing)
    assert not (home / "parity.json").exists()


def test_metric_identity_is_its_words_files_and_labels(tmp_path: Path) -> None:
    def digest(folder: str, inputs: ProofInputs, word: str = "1") -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "score.py").write_text(SCORE + folder[1:])
        command = f'sh -c "echo {word}" {folder}/score.py {{outputs}}'
        return row_of(command, inputs, below=tmp_path).sha256

    assert digest("a", INPUTS) == digest("b", INPUTS)
    assert len({digest("a", INPUTS), digest("a#", INPUTS), digest("a", INPUTS, "2"), digest("a", _labelled())}) == 4


@pytest.mark.slow("graph")
def test_metric_is_compared_with_an_older_proof(home: Path) -> None:
    highest = "import sys, numpy; print(numpy.load(sys.argv[1])['logits'].max())"
    score = f"--metric={python(highest)}"
    words = ("verify", "dense", "dense", "--images", "images.npz", "--max-error", 1, "-o")
    invoked(*words, "old.json", score)
    value = load_parity(home / "old.json").metrics[0].value
    assert run(*words[:2], "reduced", *words[3:], "now.json", score).exit_code in (0, 1)
    own = load_parity(home / "now.json").metrics[-1].value

    def verdict(rule: str, baseline: str) -> tuple[int, list[str]]:
        result = run("gate", "now.json", "--fail-if", rule, "--baseline-parity", baseline, "--json")
        return result.exit_code, [row["verdict"] for row in json.loads(result.stdout)["rules"][1:]]

    above, below = (f"metric.own < baseline {signed(own - value + step)}" for step in (0.001, -0.001))
    assert verdict(above, "old.json") == (1, ["FAIL"])
    assert verdict(below, "old.json")[1] == ["PASS"]
    assert verdict("relative_error > baseline", "old.json")[1] == ["FAIL"]
    np.savez(home / "images.npz", images=tiny.images(9, seed=4))
    invoked(*words, "other.json", score)
    assert verdict(below, "other.json")[1] == ["NOT-COMPARABLE"]
    assert verdict("relative_error > baseline", "other.json")[1] == ["NOT-COMPARABLE"]
    refuses("needs --baseline-parity FILE", "gate", "now.json", "--fail-if", below)
    first = ("gate", "old.json", "--fail-if", "metric.own < baseline - 1", "--baseline-parity", "base.json")
    invoked(*first, code=2)
    invoked(*first, "--init-baseline")
    assert (home / "base.json").read_bytes() == (home / "old.json").read_bytes()


def test_metrics_apply_to_graphs_without_their_model(home: Path) -> None:
    seen = "import sys, numpy; f = numpy.load(sys.argv[1]); print(len(f['names']) + f['logits'].size)"
    graph, asked = "reduced/model.onnx", ("--metric", f"seen={python(seen)}")
    invoked("verify", graph, graph, "--images", "images.npz", "-o", "p.json", *asked, code=3)
    assert [row.value for row in load_parity(home / "p.json").metrics] == [9 + 9 * 7] * 2
    golden = ("verify", graph, "--images", "images.npz", "--write-golden", "golden")
    invoked(*golden, *asked, code=2)
    invoked(*golden)
    invoked("verify", "golden", graph, "-o", "q.json", *asked, code=3)
    assert [row.value for row in load_parity(home / "q.json").metrics] == [9 + 9 * 7] * 2
    invoked("gate", "q.json", "--fail-if", "metric.seen < dense - 1")


def test_metric_beyond_its_time_limit_is_killed_with_its_children() -> None:
    started = time.monotonic()
    command = python("import subprocess; subprocess.run(['sleep', '60'])")
    rejects(r"took longer than 0\.5 s and was stopped", value_of, command, time_limit_s=0.5)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["python score.py"], r"\{outputs\} is missing"),
        (["a='python {outputs}"], "can't be split into words"),
        (["a=python {outputs}", "a=ruby {outputs}"], "two metrics are called 'a'"),
        (["module:score.py"], r"expected module:PATH\.py:FUNCTION"),
        (["Hits=python {outputs}"], r"'Hits' is not a name; use lower-case letters"),
        (["=python {outputs}"], r"'' is not a name"),
        (["{outputs}"], r"\{outputs\} is data, but the first word is the program to run"),
    ],
)
def test_invalid_metrics_are_refused_before_anything_runs(texts: list[str], says: str) -> None:
    rejects(says, metrics_from_texts, texts)
    words = [word for text in texts for word in ("--metric", text)]
    invoked("verify", "dense", "reduced", "--images", "x.npy", "-o", "p.json", *words, code=2)


def test_time_limit_without_a_metric_is_refused() -> None:
    words = ("verify", "a", "b", "--random", "3", "-o", "p.json", "--metric-time-limit", "3")
    refuses("--metric-time-limit is for --metric", *words)


@pytest.mark.slow("graph")
def test_release_applies_recipe_metrics_to_pixel_graphs(home: Path) -> None:
    """The graphs take uint8, and samples, server configuration, manifest, card and report agree with them."""
    (home / "score.py").write_text(QUIET)
    photographs = np.random.default_rng(0).integers(0, 256, (22, 3, 32, 32), dtype=np.uint8)
    np.save(home / "calibration.npy", photographs[8:])
    np.savez(home / "held-out.npz", images=photographs[:8], labels=np.arange(8) % 7)
    recipe = PLAIN.replace('["fp32"]\n', '["fp32"]\ninput = "uint8"\n').replace("samples = 9", "samples = 8")
    asked = f"[parity]\nmetric = ['hits={sys.executable} score.py {{outputs}}']\nmetric_files = ['score.py']\n"
    recipe = recipe.replace("[parity]\n", asked).replace('fail_if = ["params', 'fail_if = ["metric.hits < -1", "params')
    (home / "recipe.toml").write_text(recipe)
    release = ("release", "recipe.toml", "-o", "out", "--init-baseline", "--baseline", "base.json", "--trust-code")
    invoked(*release)
    out = home / "out"
    assert np.load(out / "samples" / "images.npy").dtype == np.uint8
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["input"] == {
        "dtype": "uint8", "shape": [3, 32, 32], "normalised": "patch_embed.proj",
        "before": "preprocessing without mean and std",
    }  # fmt: skip
    assert "data_type: TYPE_UINT8" in next((out / "repository").rglob("config.pbtxt")).read_text()
    models = [row.model for row in load_parity(out / "parity.json").metrics]
    assert models[:2] == ["dense torch fp32", "reduced torch fp32"]
    assert "Measures of your own" in (out / "report.md").read_text()
    card = (out / "MODEL_CARD.md").read_text()
    assert "take uint8 pixels of that size: mean and std are inside, patch_embed.proj" in card
    assert "hits: dense torch fp32" in card
    invoked("check", "out")
    (home / "score.py").write_text(QUIET.replace("right.mean()", "right.sum()"))
    invoked(*release)
    assert load_parity(out / "parity.json").metrics[0].value in range(9), "another script, another measure"
