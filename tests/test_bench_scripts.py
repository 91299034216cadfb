"""The benchmarks of costs, on sizes that take seconds."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.pages import cost_page
from benchmarks.speed import passes, proof_cost, workers
from calib.store import load_moments
from corp_deploy.invocation import budget_choice as told
from tests import tiny

pytestmark = pytest.mark.nightly

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 1, "num_heads": 3, "num_classes": 7}


def test_committed_records_meet_the_goals() -> None:
    results = Path(__file__).parents[1] / "benchmarks" / "results"
    for path in results.glob("passes*.json"):  # what help texts say in round figures
        costs = json.loads(path.read_text())
        assert costs["images"] >= told.EXAMPLE_IMAGES, path.name
        for row, most in (("calibrate", told.CALIBRATE), ("macs", told.BUDGET), ("loop", told.CLOSED_LOOP)):
            assert costs["passes"][row] <= most + 0.5, (path.name, row)


def test_costs_are_reported_in_passes(tmp_path: Path) -> None:
    kwargs = ["--model", "vit_tiny_patch16_224", "--model-kwargs", json.dumps(TINY)]
    few = ["--images", "8", "--share", "0.8", "--rounds", "1", "-o", str(tmp_path / "passes.json")]
    few += ["--threads", str(torch.get_num_threads())]
    result = CliRunner().invoke(passes.main, [*kwargs, *few])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "passes.json").read_text())
    assert record["cpu"]
    assert list(record["passes"]) == [*passes.BARE, *passes.ROWS]
    assert all(len(each["cpu_s"]) == 1 for each in record["samples"].values())


def test_pass_cost_is_relative_to_the_faster_bare_pass_of_its_round() -> None:
    def cpu(*seconds: float) -> dict[str, list[float]]:
        return {"cpu_s": list(seconds)}

    whole, pieces = passes.BARE
    found = passes.in_passes({whole: cpu(3.0, 4.0, 3.0), pieces: cpu(2.0, 4.0, 2.0), "loop": cpu(12.0, 20.0, 8.0)})
    assert found == {whole: 1.5, pieces: 1.0, "loop": 5.0}


def test_rate_of_workers_is_relative_to_one_process_in_the_same_round() -> None:
    two = (workers.PROCESSES, 2)
    samples = {(workers.ONE, 1): [4.0, 8.0, 4.0], two: [2.0, 5.0, 8.0]}
    found = workers.figures(samples, two, 40)
    assert found == {"images_per_s": 8.0, "ratio": 1.6, "samples_s": [2.0, 5.0, 8.0]}


@pytest.mark.slow("process")
def test_processes_and_one_of_them_take_the_same_images(tmp_path: Path) -> None:
    job = workers.prepared("vit_tiny_patch16_224", TINY, 8, tmp_path)
    with workers.processes(job, 2, 1) as both:
        assert workers.taken_s(job, both) > 0
    assert load_moments(tmp_path / "moments.safetensors").images == 8


@pytest.mark.slow("graph")
def test_proof_cost_is_reported_in_passes_and_memory(tmp_path: Path) -> None:
    kwargs = ["--model", tiny.ARCHITECTURE.name, "--model-kwargs", json.dumps(tiny.ARCHITECTURE.kwargs)]
    result = CliRunner().invoke(
        proof_cost.main, [*kwargs, "--images", "8", "--threads", "1", "-o", str(tmp_path / "proof_cost.json")]
    )
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "proof_cost.json").read_text())
    assert list(record["pass_cpu_s"]) == ["dense in FP16", *proof_cost.ARTEFACTS]
    assert record["ratio"] == pytest.approx(record["verify"]["cpu_s"] / sum(record["pass_cpu_s"].values()))
    assert record["verify"]["peak_mb"] > 100
    assert "times the cost of the necessary passes" in cost_page.proof_cost(record)
