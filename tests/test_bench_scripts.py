"""The benchmarks of sweeps and of the text encoder, on sizes that take seconds."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.harness import Record
from benchmarks.pages import cost_page
from benchmarks.pages.accuracy_page import text_encoder as text_encoder_table
from benchmarks.quality import text_encoder
from benchmarks.quality.reference_text import opened
from benchmarks.speed import passes, proof_cost
from corp_deploy.families.bert import EncoderArguments, architecture_of
from corp_deploy.families.family import sites_of
from corp_deploy.families.text_encoder import EncoderArchitecture
from corp_deploy.families.tokenizer import Tokenization
from corp_deploy.invocation import budget_choice as told
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from tests import tiny

pytestmark = pytest.mark.nightly

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 1, "num_heads": 3, "num_classes": 7}


def subject(monkeypatch: pytest.MonkeyPatch, directory: Path) -> text_encoder.Subject:
    """An encoder of one small block with random weights, and pieces of 5 random tokens."""
    monkeypatch.setattr(text_encoder, "BATCH", 4)
    torch.manual_seed(0)
    encoder = EncoderArchitecture(vocabulary=40, positions=8, width=24, heads=2, hidden=128, layers=1)
    arguments = EncoderArguments(encoder=encoder, text=Tokenization(length=5, sha256="0" * 64))
    architecture = architecture_of("bert", arguments)
    dense = Checkpoint(model=dense_from_architecture(architecture), architecture=architecture, lineage={})
    texts = []
    for name, count in (("calibration", 8), ("held-out", 4)):
        rows = torch.randint(40, (count, 5)).tolist()
        texts.append(opened(directory / name, [" ".join(map(str, row)) for row in rows]))
    return text_encoder.Subject(dense, *texts)


def test_every_method_reduces_the_encoder_and_nothing_removed_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = subject(monkeypatch, tmp_path)
    record, facts = Record(tmp_path / "r.json", "benchmarks/text-encoder", {}), {"seed": 0, "calibration_tokens": 40}
    text_encoder.add_rows(record, lambda: small, (("joint", 0.5),), facts)
    rows = record["rows"]
    assert [row["method"] for row in rows] == [variant.name for variant in text_encoder.variants_of(0)]
    again = Record(tmp_path / "r.json", "benchmarks/text-encoder", {})
    text_encoder.add_rows(again, pytest.fail, (("joint", 0.5),), facts)  # all are there
    assert all(0.0 < row["error"] < 3.0 for row in rows)
    assert rows[0]["of_corp"] == 1.0
    best = text_encoder.IN_EVERY_CASE[1]
    widths = {site.name: site.width for site in sites_of(small.reduced(best, "joint", 0.5)).every}
    assert widths == {"blocks.0.attn.qk": 12, "blocks.0.attn.v": 24, "blocks.0.mlp": 64}
    assert small.error(best, "joint", 0.0) < 1e-3
    assert "| joint | 50% | 40 |" in text_encoder_table({"rows": rows})


def test_the_committed_records_hold_the_goals_of_the_method() -> None:
    results = Path(__file__).parents[1] / "benchmarks" / "results"
    sweep = json.loads((results / "sweep_cost.json").read_text())
    assert len(sweep["sparsities"]) == 10
    assert sweep["ratio"] < 1.3
    obs = json.loads((results / "obs.json").read_text())
    assert obs["deit_base"]["obs_seconds"] + obs["deit_base"]["swap_seconds"] < 60.0
    for path in results.glob("passes*.json"):  # what help texts say in round figures
        costs = json.loads(path.read_text())
        assert costs["images"] >= told.EXAMPLE_IMAGES, path.name
        for row, most in (("calibrate", told.CALIBRATE), ("macs", told.BUDGET), ("loop", told.CLOSED_LOOP)):
            assert costs["passes"][row] <= most + 0.5, (path.name, row)


def test_costs_are_told_in_passes(tmp_path: Path) -> None:
    kwargs = ["--model", "vit_tiny_patch16_224", "--model-kwargs", json.dumps(TINY)]
    few = ["--images", "8", "--share", "0.8", "--rounds", "1", "-o", str(tmp_path / "passes.json")]
    few += ["--threads", str(torch.get_num_threads())]
    result = CliRunner().invoke(passes.main, [*kwargs, *few])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "passes.json").read_text())
    assert record["cpu"]
    assert list(record["passes"]) == [*passes.BARE, *passes.ROWS]
    assert f"{record['model']} from its moments by preset best, 50% of every width" in cost_page.reduction(record)
    assert all(len(each["cpu_s"]) == 1 for each in record["samples"].values())
    assert CliRunner().invoke(passes.main, [*kwargs, *few, "--rows", "calibrat"]).exit_code == 2


def test_a_pass_is_the_faster_bare_one_and_ratios_are_of_one_round() -> None:
    def cpu(*seconds: float) -> dict[str, list[float]]:
        return {"cpu_s": list(seconds)}

    whole, pieces = passes.BARE
    found = passes.in_passes({whole: cpu(3.0, 4.0, 3.0), pieces: cpu(2.0, 4.0, 2.0), "loop": cpu(12.0, 20.0, 8.0)})
    assert found == {whole: 1.5, pieces: 1.0, "loop": 5.0}


@pytest.mark.slow("graph")
def test_a_proof_is_told_in_passes_and_memory(tmp_path: Path) -> None:
    kwargs = ["--model", tiny.ARCHITECTURE.name, "--model-kwargs", json.dumps(tiny.ARCHITECTURE.kwargs)]
    result = CliRunner().invoke(
        proof_cost.main, [*kwargs, "--images", "8", "--threads", "1", "-o", str(tmp_path / "proof_cost.json")]
    )
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "proof_cost.json").read_text())
    assert list(record["pass_cpu_s"]) == ["dense in FP16", *proof_cost.ARTEFACTS]
    assert record["ratio"] == pytest.approx(record["verify"]["cpu_s"] / sum(record["pass_cpu_s"].values()))
    assert record["verify"]["peak_mb"] > 100
    assert "times the passes that it needs in any case" in cost_page.proof_cost(record)
