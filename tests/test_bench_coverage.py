"""The record of what goes through the whole chain is true of the models as they are, and says what it has to."""

import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.coverage import chain, classes
from benchmarks.coverage.instances import INSTANCES, Instance
from benchmarks.coverage.models import dense
from benchmarks.coverage.small import smalls
from corp_deploy.families.family import CONVOLUTIONS, OPTION_KINDS, sites_of

pytestmark = pytest.mark.nightly

RECORD = Path(__file__).parents[1] / "benchmarks" / "results" / "coverage.json"
ROWS: list[dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
GONE = [row for row in ROWS if "refused" not in row]


def instance_of(row: dict[str, Any]) -> Instance:
    (found,) = [each for each in INSTANCES if (each.source, each.name) == (row["source"], row["name"])]
    return found


def test_every_instance_has_a_row_and_most_pass() -> None:
    assert {(row["source"], row["name"]) for row in ROWS} == {(each.source, each.name) for each in INSTANCES}
    by_source = {source: [row for row in GONE if row["source"] == source] for source in ("timm", "transformers")}
    assert len(by_source["timm"]) >= 60
    assert len({row["family"] for row in by_source["timm"]}) >= 15
    assert len(by_source["transformers"]) >= 8


@pytest.mark.parametrize("row", GONE, ids=lambda row: row["name"])
def test_passed_rows_meet_the_bounds(row: dict[str, Any]) -> None:
    errors, engines = row["errors"], row["engines"]
    assert row["graphs"]["fp32"] < 1e-4
    assert row["graphs"]["fp16"] < 2e-2
    assert all(error < 1e-5 for error in row["identity"].values())
    assert errors["best"] < min(errors["none"], errors["corp"])
    assert engines["reduced"]["fused"] >= engines["dense"]["fused"]
    assert engines["reduced"]["sites"] == engines["dense"]["sites"]


@pytest.mark.slow("models")
@pytest.mark.parametrize("row", GONE, ids=lambda row: row["name"])
def test_rows_list_the_sites_of_the_model(row: dict[str, Any], tmp_path: Path) -> None:
    if row["source"] != "timm" and find_spec(row["source"]) is None:
        pytest.skip(f"{row['source']} is not installed")
    sites = sites_of(dense(instance_of(row), tmp_path).model)
    own = Counter(each.kind for each in sites.every)
    kinds = Counter(OPTION_KINDS.get(each.kind, each.kind) for each in sites.every)
    found = kinds["channels"], max(own[chain.PAIRS], own[chain.VALUES]), kinds[CONVOLUTIONS]
    assert (row["mlps"], row["attentions"], row.get("rows", 0)) == found
    assert row["reasons"] == sorted({refusal.reason for refusal in sites.refused})


@pytest.mark.slow("graph")
def test_chain_reproduces_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = [row for row in ROWS if row["name"] == "deit_tiny_patch16_224"]
    monkeypatch.setattr(chain, "PRECISIONS", ("fp32",))
    monkeypatch.setattr(chain, "fused", lambda subject, candidate, directory: None)
    again = instance_of(row).key | chain.row_of(instance_of(row))
    own = {"errors": row["errors"], "graphs": row["graphs"]}
    assert again | own == {"inputs": 64, "draws": 1, "rows": 0, **row, "engines": again["engines"]}
    assert again["errors"] == pytest.approx(row["errors"], rel=0.05)
    assert again["graphs"]["fp32"] < 1e-4


@pytest.mark.slow("graph")
@pytest.mark.parametrize("kind", ["two inputs", "several outputs"])
def test_class_without_a_family_passes_the_whole_chain(kind: str) -> None:
    (small,) = [each for each in smalls() if each.kind == kind]
    row = classes.measured(small)
    assert row["share"] > 0.5
    assert row["identity"] < 1e-6
    assert row["errors"]["best"] < min(row["errors"]["none"], row["errors"]["corp"])
    assert row["graphs"]["fp32"] < 1e-4
