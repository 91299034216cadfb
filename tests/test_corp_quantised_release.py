"""Releases with an INT8 target: its speed against FP32, the gate, and the choice of the served graph."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from corp_deploy.invocation.engine import ServingOptions
from corp_deploy.release.proven import proof_of_directory
from corp_deploy.release.serving import choose_served_file, is_faster, package_of_directory, quantised_graph
from corp_deploy.store.graph_facts import facts_of_onnx
from perf.record.runs import Bench, Row, TimedBlock, load_bench, save_bench
from tests import tiny
from tests.command import refuses, run
from tests.doubles import some
from tests.recipes import recipe

RECIPE = recipe(
    {
        "reduce": {"mlp": 0.3, "align_mlp": 8},
        "export": {"precisions": ["fp32", "int8"], "rest": "fp32", "range_samples": 6, "weight_bits": 7},
        "parity": {"batches": [1, 3], "quantised_factor": 8.0},
        "targets.onnxruntime-cpu": {"precision": "int8"},
    }
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tiny.written(tmp_path_factory.mktemp("int8-release"), 12, to="calibration.npy")
    np.save(home / "held-out.npy", tiny.images(6, seed=1))
    (home / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    done = run("release", home / "recipe.toml", "-o", home / "release")
    assert done.exit_code in (0, 1, 3), done.output
    assert "Traceback" not in done.output, done.output
    return home


@pytest.mark.slow("graph")
def test_gate_requires_a_measured_gain(home: Path) -> None:
    release = home / "release"
    rules = json.loads((release / "gate.json").read_text())["rules"]
    (own,) = [rule for rule in rules if "int8 over fp32" in rule["rule"]]
    assert own["rule"] == "onnxruntime-cpu: int8 over fp32: speedup@b2 <= 1"
    bench = load_bench(release / "gain.onnxruntime-cpu.json")
    assert [subject.name for subject in bench.subjects] == ["fp32", "int8"]
    assert (own["verdict"] == "PASS") == is_faster(bench)
    assert "int8 against fp32, both reduced:" in (release / "MODEL_CARD.md").read_text()
    links = json.loads((release / "parity.json").read_text())["links"]
    assert {"quantised", "exact", "reduced"} <= {link["kind"] for link in links}


@pytest.mark.slow("graph")
def test_recipe_sets_the_bits_of_the_graph(home: Path) -> None:
    assert facts_of_onnx(home / "release" / "reduced" / "model.int8.onnx").weight_bits == 7


def with_gain(bench: Bench, times: float) -> Bench:
    """Return the record with 24 rounds in which the candidate is so many times as fast as the reference."""

    def blocks(row: Row) -> tuple[TimedBlock, ...]:
        first = [block for block in row.blocks if block.round == row.blocks[0].round]
        return tuple(timed(replace(block, round=number)) for number in range(24) for block in first)

    def timed(block: TimedBlock) -> TimedBlock:
        factor = 1.0 if block.subject == bench.reference.name else 1.0 / times
        times_ms = tuple(2.0 * factor + 1e-3 * ((at + block.round) % 3) for at in range(8))
        return replace(block, compute_ms=times_ms, calls=8, lost_ms=None, dropped=None)

    return replace(bench, rows=tuple(replace(row, blocks=blocks(row)) for row in bench.rows))


@pytest.mark.slow("graph")
@pytest.mark.parametrize(("times", "served"), [(2.0, "model.int8.onnx"), (1.0, "model.onnx"), (0.5, "model.onnx")])
def test_only_faster_variants_are_served(home: Path, tmp_path: Path, times: float, served: str) -> None:
    release = home / "release"
    for part in ("reduced", "bench.json", "parity.json"):
        (tmp_path / part).symlink_to(release / part)
    name = "gain.onnxruntime-cpu.json"
    save_bench(with_gain(load_bench(release / name), times), tmp_path / name)
    graph = quantised_graph(tmp_path, "onnxruntime-cpu")
    assert graph == tmp_path / "reduced" / "model.int8.onnx"
    path, note = choose_served_file(tmp_path, "onnxruntime-cpu", graph)
    assert (path.name, note is None) == (served, times > 1)
    package, notes = package_of_directory(tmp_path, proof_of_directory(tmp_path), ServingOptions(name="tiny"))
    assert some(package.cpu_onnx).name == served
    assert bool(package.expected) == (times > 1), "figures of another graph are left out"
    assert any("model.int8.onnx is left out" in each for each in notes) == (times <= 1)


@pytest.mark.slow("graph")
def test_int8_needs_calibration_images(home: Path) -> None:
    wrong, of_fp8 = home / "wrong.toml", RECIPE.replace('"int8"', '"fp8"').replace("weight_bits = 7", "")
    for text, message in (
        (RECIPE.replace('rest = "fp32"', 'rest = "fp16"'), "add 'fp16' to export.precisions"),
        (of_fp8, "ONNX Runtime's CPU kernels have no arithmetic in float8_e4m3fn"),
    ):
        wrong.write_text(text, encoding="utf-8")
        refuses(message, "release", wrong, "-o", home / "other")
        assert not (home / "other").exists()
