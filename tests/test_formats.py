"""Formats that pipelines read, each checked by the rules of its own readers."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import parser as prometheus
from prometheus_client.openmetrics import parser as openmetrics
from pydantic_sarif.model import StaticAnalysisResultsFormatSarifVersion210JsonSchema as Sarif

import corp_deploy
from corp_deploy.formats.annotations import annotate_run
from corp_deploy.formats.bencher import LONGEST_NAME, bmf_from_figures
from corp_deploy.formats.figures import Figure, figures_of
from corp_deploy.formats.openmetrics import openmetrics_from_records
from corp_deploy.formats.sarif import sarif_from_findings
from corp_deploy.formats.tracking import tracked_from_figures, write_tracking
from export.triton.lint_artifact import RULES, LintFinding
from ground.errors import BadInput, Missing
from perf.gate.evidence import Evidence
from perf.gate.gate import Gate, JudgedRule, Verdict
from perf.parity.parity import ImageSet, Parity
from tests.command import invoked, refuses
from tests.histories import bench_of_release
from tests.links import link_between

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "files"
BENCH, PARITY = GOLDEN / "release" / "bench.json", GOLDEN / "release" / "parity.json"
HOSTILE = 'a%b:c,d"e\\f\ng\r::error::h\u202e'


def judged(verdict: Verdict, rule: str = "p50 > 1", message: str = "2, limit 1") -> JudgedRule:
    return JudgedRule(rule=rule, verdict=verdict, message=message, metric="p50")


def evidence(**environment: str) -> Evidence:
    """Times of 5 and 4 ms an image at batches 1 and 8, sizes, and an agreement of 15 of 16 inputs."""
    bench = bench_of_release(0, 4.0, batches=(1, 8), environment={"cpu": "A CPU", "gpu": "A GPU", **environment})
    sizes = (replace(each, size_bytes=size) for each, size in zip(bench.subjects, (1000, 600), strict=True))
    dense, reduced = (replace(each, describe={**each.describe, "precision": "int8"}) for each in sizes)
    rows = np.eye(16)
    other = rows.copy()
    other[0] = rows[1]
    links = (
        link_between(rows, rows, kind="reduced", name="reduced"),
        link_between(rows, other, kind="whole", name="w"),
    )
    parity = Parity(images=ImageSet(count=16, digest="sha256:00"), links=links)
    return Evidence(bench=replace(bench, subjects=(dense, reduced)), parity=parity)


def command_of(line: str) -> tuple[str, dict[str, str], str]:
    """Parse a line as GitHub's runner does: command, properties and message, each unescaped."""
    found = re.fullmatch(r"::([a-z]+) ([^:]*)::(.*)", line)
    assert found, line

    def unescaped(text: str, *more: tuple[str, str]) -> str:
        for code, letter in (("%0D", "\r"), ("%0A", "\n"), *more, ("%25", "%")):
            text = text.replace(code, letter)
        return text

    pairs = (part.split("=", 1) for part in found[2].split(","))
    properties = {name: unescaped(value, ("%3A", ":"), ("%2C", ",")) for name, value in pairs}
    return found[1], properties, unescaped(found[3])


def test_annotations_survive_the_runners_parsing(tmp_path: Path) -> None:
    verdicts: tuple[Verdict, ...] = ("PASS", "FAIL", "NOT-COMPARABLE", "INCONCLUSIVE", "UNJUDGED")
    gate = Gate(rules=tuple(judged(verdict, rule=HOSTILE, message=HOSTILE) for verdict in verdicts))
    lines = [*annotate_run(gate, "", {"GITHUB_ACTIONS": "true"})]
    assert all(len(line.splitlines()) == 1 and "\u202e" not in line for line in lines)
    commands = [command_of(line) for line in lines]
    assert [level for level, _, _ in commands] == ["error", "error", "warning", "notice"]
    shown = HOSTILE.replace("\u202e", "\\u202e")
    assert commands[0][1:] == ({"title": f"FAIL: {shown}"}, shown)


def test_step_summary_is_appended_in_github_actions_alone(tmp_path: Path) -> None:
    gate, summary = Gate(rules=(judged("FAIL"),)), tmp_path / "summary.md"
    summary.write_text("before\n")
    environment = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)}
    assert len([*annotate_run(gate, "**Gate: FAIL**", environment)]) == 1
    assert summary.read_text() == "before\n**Gate: FAIL**\n"
    assert [*annotate_run(gate, "again", {"GITHUB_STEP_SUMMARY": str(summary)})] == []
    assert "again" not in summary.read_text()


@pytest.fixture
def in_actions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    return tmp_path / "summary.md"


def test_gate_annotates_beside_json(in_actions: Path) -> None:
    words = ("gate", BENCH, PARITY, "--fail-if", "size_bytes > 1", "--fail-if", "p50@b1 > 1e9")
    result = invoked(*words, "--json", code=1)
    assert json.loads(result.stdout)["verdict"] == "FAIL"
    levels = [command_of(line)[0] for line in result.stderr.splitlines() if line.startswith("::")]
    assert levels == ["error", "warning"], "a limit is broken, and one round shows nothing"
    assert in_actions.read_text().startswith("**Gate: FAIL**\n\n| verdict |")
    assert "| FAIL | `size_bytes > 1` |" in in_actions.read_text()


def checked_bmf(text: str) -> Mapping[str, Any]:
    """Check the types of BMF: benchmark -> measure -> value with optional ends, all finite; names of bounded length."""
    benchmarks = json.loads(text)
    for benchmark, measures in benchmarks.items():
        assert 1 <= len(benchmark) <= 1024
        for measure, metric in measures.items():
            assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", measure), "a slug"
            assert len(measure) <= 64
            assert {"value"} <= metric.keys() <= {"value", "lower_value", "upper_value"}
            assert all(type(each) is float and math.isfinite(each) for each in metric.values())
            assert metric.get("lower_value", -math.inf) <= metric["value"] <= metric.get("upper_value", math.inf)
    return dict(benchmarks)


def test_bencher_reads_latency_in_nanoseconds() -> None:
    benchmarks = checked_bmf(bmf_from_figures(figures_of(evidence())))
    latency = benchmarks["reduced at batch 8"]["latency"]
    assert latency["value"] == pytest.approx(32e6, rel=0.01)
    assert latency.keys() == {"value", "lower_value", "upper_value"}
    assert benchmarks["reduced at batch 8"]["throughput"]["value"] == pytest.approx(250, rel=0.01)
    assert benchmarks["reduced"]["file-size"] == {"value": 600.0}
    assert benchmarks["reduced at batch 1"]["speed-up"]["value"] == pytest.approx(1.25, rel=0.01)
    (agreement,) = (each["agreement"] for each in benchmarks.values() if "agreement" in each)
    assert agreement["value"] == 15 / 16
    assert agreement["lower_value"] < 15 / 16 < agreement["upper_value"]


def test_bencher_names_are_short_enough() -> None:
    figure = Figure(subject="x" * 2000, measure="p50", value=1.0, batch=8)
    (name,) = checked_bmf(bmf_from_figures([figure]))
    assert len(name) == LONGEST_NAME
    assert name.endswith(" at batch 8")


def test_tracked_figures_are_split_by_direction(tmp_path: Path) -> None:
    write_tracking(evidence(), tmp_path)
    smaller, bigger = (json.loads((tmp_path / f"{word}-is-better.json").read_text()) for word in ("smaller", "bigger"))
    assert {figure["unit"] for figure in smaller} == {"ms", "bytes"}
    assert {figure["unit"] for figure in bigger} == {"images/s", "times", "share"}
    assert "speed-up at batch 8" in {figure["name"] for figure in bigger}
    p50 = next(figure for figure in smaller if figure["name"] == "reduced p50 at batch 8")
    assert p50["value"] == pytest.approx(32.0, rel=0.01)
    assert "to" in p50["range"]
    checked_bmf((tmp_path / "bencher.json").read_text())
    without = Figure(subject="dense", measure="size", value=1.0)
    assert json.loads(tracked_from_figures([without])) == [{"name": "dense size", "unit": "bytes", "value": 1.0}]
    with pytest.raises(BadInput, match=r"--track writes timings; give a bench\.json"):
        write_tracking(Evidence(parity=evidence().parity), tmp_path)


def samples_of(text: str) -> dict[tuple[str, str], tuple[dict[str, str], float]]:
    """Return samples by name and batch or verdict, read as OpenMetrics and, as node_exporter does, as plain text."""
    families = [*openmetrics.text_string_to_metric_families(text)]
    assert {each.type for each in families} == {"gauge"}
    assert all(each.name.endswith(each.unit) and each.documentation for each in families)
    read = [(each.name, each.labels, each.value) for family in families for each in family.samples]
    plain = [each for family in prometheus.text_string_to_metric_families(text) for each in family.samples]
    assert [(each.name, each.labels, each.value) for each in plain] == read
    return {(name, labels.get("batch") or labels.get("verdict", "")): (labels, value) for name, labels, value in read}


def test_openmetrics_are_in_base_units(tmp_path: Path) -> None:
    text = openmetrics_from_records(evidence(), Gate(rules=(judged("FAIL"),)), tmp_path, name="vit_cpu", version=3)
    assert text.endswith("\n# EOF\n")
    samples = samples_of(text)
    labels, seconds = samples["corp_deploy_promised_p50_seconds", "8"]
    assert labels == {"model": "vit_cpu", "version": "3", "precision": "int8", "device": "A CPU", "batch": "8"}
    assert seconds == pytest.approx(0.032, rel=0.01)
    per_second = samples["corp_deploy_promised_throughput_images_per_second", "1"][1]
    assert per_second == pytest.approx(250, rel=0.01)
    assert samples["corp_deploy_size_bytes", ""][1] == 600.0
    assert samples["corp_deploy_agreement_ratio", ""][1] == 15 / 16
    verdicts = {key[1]: value for key, (_, value) in samples.items() if key[0] == "corp_deploy_gate_verdict"}
    assert verdicts == {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 0, "NOT-COMPARABLE": 0, "UNJUDGED": 0}


def test_openmetrics_escapes_labels(tmp_path: Path) -> None:
    text = openmetrics_from_records(evidence(cpu=HOSTILE), Gate(rules=(judged("PASS"),)), tmp_path, name=HOSTILE)
    labels, _ = samples_of(text)["corp_deploy_size_bytes", ""]
    assert (labels["model"], labels["device"]) == (HOSTILE, HOSTILE)


def test_metrics_of_a_release_have_its_name_and_version(tmp_path: Path) -> None:
    for name in ("bench.json", "manifest.json"):
        shutil.copyfile(GOLDEN / "release" / name, tmp_path / name)
    metrics, words = tmp_path / "release.prom", ("gate", tmp_path / "bench.json", "--fail-if", "size_bytes > 1e9")
    invoked(*words, "--metrics", metrics)
    labels, _ = samples_of(metrics.read_text())["corp_deploy_size_bytes", ""]
    assert labels == {"model": "golden", "version": "1", "precision": "fp32", "device": "AMD EPYC"}
    invoked(*words, "--metrics", metrics, "--name", "golden_cpu", "--model-version", 7)
    labels, _ = samples_of(metrics.read_text())["corp_deploy_size_bytes", ""]
    assert (labels["model"], labels["version"]) == ("golden_cpu", "7")
    refuses("--metrics writes timings; give a bench.json", "gate", PARITY, "--metrics", metrics)
    refuses("--name labels the figures of --metrics: give --metrics FILE", *words, "--name", "golden_cpu")


def sarif_results(text: str) -> list[dict[str, Any]]:
    """Validate SARIF by the model that is generated from its schema and forbids unknown fields; return its results."""
    assert Sarif.model_validate_json(text).version.value == "2.1.0"
    (run,) = json.loads(text)["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert {each["id"]: each["help"]["text"] for each in rules} == RULES
    assert all(rules[each["ruleIndex"]]["id"] == each["ruleId"] for each in run["results"])
    return list(run["results"])


def test_sarif_names_rules_levels_and_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    repository = Path(shutil.copytree(GOLDEN / "release" / "repository", tmp_path / "models" / "of us"))
    config = repository / "golden_cpu" / "config.pbtxt"
    config.write_text(config.read_text() + "cuda_graphs: 1\n")
    (repository / "golden_onnx" / "1" / "model.onnx").unlink()
    result = invoked("package", "lint", "models/of us", "-o", "lint.sarif", code=1)
    assert "2 findings" in result.stdout
    field, missing = sarif_results((tmp_path / "lint.sarif").read_text())
    assert (field["ruleId"], field["level"]) == ("field", "error")
    place = field["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "models/of%20us/golden_cpu/config.pbtxt", "uriBaseId": "%SRCROOT%"}
    assert place["region"] == {"startLine": len(config.read_text().splitlines())}
    assert missing["ruleId"] == "artefact"
    assert missing["message"]["text"].startswith("model.onnx is missing in 1/")
    assert "region" not in missing["locations"][0]["physicalLocation"]
    rows = json.loads(invoked("package", "lint", repository, "--json", code=1).stdout)["findings"]
    assert [row["rule"] for row in rows] == ["field", "artefact"]


def test_sarif_escapes_names_and_braces(tmp_path: Path) -> None:
    inside, outside = tmp_path / "a#b" / "\udcff.so", Path("/elsewhere/c d")
    findings = [LintFinding(path, "warning", "has {0}", HOSTILE, rule="port") for path in (inside, outside)]
    results = sarif_results(sarif_from_findings(findings, tmp_path))
    assert results[0]["message"]["text"].startswith("has {{0}}; a%b:c")
    places = [each["locations"][0]["physicalLocation"]["artifactLocation"] for each in results]
    assert places == [{"uri": "a%23b/%FF.so", "uriBaseId": "%SRCROOT%"}, {"uri": "file:///elsewhere/c%20d"}]
    assert sarif_results(sarif_from_findings([], tmp_path)) == []


LOGGED = """
import json, sys
import mlflow
import corp_deploy

release, store = sys.argv[1:]
mlflow.set_tracking_uri(store)
with mlflow.start_run(run_name="ours") as active:
    assert corp_deploy.log_to_mlflow(release) == active.info.run_id
run = mlflow.get_run(corp_deploy.log_to_mlflow(release))
artifacts = [each.path for each in mlflow.MlflowClient().list_artifacts(run.info.run_id)]
print(json.dumps(run.to_dictionary() | {"artifacts": artifacts, "runs": len(mlflow.search_runs(output_format="list"))}))
"""


@pytest.mark.slow("process")
def test_mlflow_store_has_recipe_figures_and_report(tmp_path: Path) -> None:
    """In a process of its own: MLflow sets up logging and threads, and by default reports its use to its makers."""
    release, store = GOLDEN / "release", tmp_path / "mlruns"
    environment = os.environ | {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = (sys.executable, "-c", LOGGED, release, store.as_uri())
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    run = json.loads(done.stdout)
    parameters, metrics, tags = (run["data"][name] for name in ("params", "metrics", "tags"))
    assert (parameters["reduce.mlp"], parameters["bench.batches"]) == ("0.3", "[1]")
    assert parameters["targets.onnxruntime-cpu.sparse"] == "False"
    assert metrics["reduced.p50_ms.b1"] == 0.3077815
    assert metrics["dense.size_bytes"] == 31260
    assert metrics["reduced_model.onnx_ONNX_fp32.agreement"] == pytest.approx(7 / 9)
    assert (tags["mlflow.runName"], tags["corp_deploy.gate"], tags["corp_deploy.version"]) == ("golden 1", "PASS", "1")
    assert run["artifacts"] == ["MODEL_CARD.md", "recipe.toml", "report.html", "report.md", "report.xml"]
    assert (run["info"]["status"], run["runs"]) == ("FINISHED", 2)


def test_mlflow_refuses_other_directories_and_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"no recipe\.toml in it, expected the directory of a release"):
        corp_deploy.log_to_mlflow(tmp_path)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(Missing, match=r"pip install 'corp-deploy\[mlflow\]'"):
        corp_deploy.log_to_mlflow(GOLDEN / "release")
