"""A model that merges tokens through a release, and what its records, report, card and inspect say of the merging."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.trust.faults_scenarios import RECIPE
from calib.store import load
from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs
from corp_deploy.families.inspection import inspection_of_model, merging_record
from corp_deploy.store.checkpoint import load_checkpoint
from corp_deploy.traced.models.merging import Merging
from corp_deploy.views.inspection import merging_lines
from perf.report.render import csv, html, markdown
from tests.command import invoked

from . import tiny

MERGED = RECIPE.replace("attn = 0.5", 'merge_tokens = "2,4"')


def test_a_record_has_the_tokens_and_the_multiply_adds_of_every_block() -> None:
    dense = tiny.checkpoint().model
    assert merging_record(dense) is None
    model = traced_model.with_merging(dense, Merging(schedule=(3, 4)))
    record = merging_record(model)
    assert record is not None
    assert record.tokens == (17, 14, 10)
    assert record.protected == 1
    assert record.rows == ((0, 17, 3, 14), (1, 14, 4, 10))
    # 8 even and 8 odd tokens, then 7 and 6, of 48 channels, and the means of those that are merged.
    assert record.macs_of_merging == 48 * (8 * 8 + 3 * 8 + 7 * 6 + 4 * 6)
    assert record.macs == macs(model)
    assert record.macs_with_all_tokens == macs(dense)
    first, second = record.sentences()
    assert "most alike by what merging them changes in the residual stream: 17 tokens become 10, 1 of them" in first
    assert f"{macs(model) / macs(dense):.1%} of the multiply-adds" in second
    lines = merging_lines(inspection_of_model(model))
    assert lines == [first, second, "tokens behind each block: 14 10"]
    assert merging_lines(inspection_of_model(dense)) == []


@pytest.mark.parametrize(
    ("merging", "words"),
    [
        (Merging(schedule=(5, 0), how="drop"), "drops the tokens that the class token attends to least: 17 tokens"),
        (Merging(schedule=(2, 2), metric="stream"), "most alike by the cosine of the residual stream"),
        (Merging(schedule=(2, 2), metric="keys"), "most alike by the cosine of the keys of all heads"),
        (Merging(schedule=(2, 2), unmerged=True), "each source token has the value of the token"),
    ],
)
def test_every_way_of_merging_has_its_words(merging: Merging, words: str) -> None:
    record = merging_record(traced_model.with_merging(tiny.checkpoint().model, merging))
    assert record is not None
    assert words in " ".join(record.sentences())


def test_a_report_shows_tokens_by_block() -> None:
    blocks = [[0, 17, 3, 14], [1, 14, 4, 10]]
    sentences = ["each block merges <them>: 17 tokens become 10", "this takes 70%"]
    record = {"title": "a", "merging": {"verb": "merged", "sentences": sentences, "blocks": blocks}}
    text = markdown(record)
    assert "Each block merges" in text
    assert "| block 1 | 14 | 4 | 10 |" in text
    assert "This takes 70%." in text
    page = html(record)
    assert "&lt;them&gt;" in page
    assert "<th" in page
    assert "merging,block 1,,,tokens_behind,10" in csv(record).replace(".0", "")
    assert "Tokens by block" not in markdown({"title": "a"})


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tiny.written(tmp_path_factory.mktemp("merged"), 12, to="calibration.npy")
    np.savez(home / "held-out.npz", images=tiny.images(9, seed=1), labels=np.arange(9) % 7)
    (home / "recipe.toml").write_text(MERGED)
    invoked("release", home / "recipe.toml", "-o", home / "out")
    return home / "out"


@pytest.mark.slow("graph")
def test_its_moments_are_taken_with_merging_active(released: Path) -> None:
    (moments,) = released.rglob("moments.safetensors")
    assert json.loads(load(moments).lineage["merging"])["schedule"] == [2, 4]


@pytest.mark.slow("graph")
def test_a_release_of_a_model_that_merges_ends_in_its_verdict(released: Path) -> None:
    assert json.loads((released / "gate.json").read_text())["verdict"] == "PASS"
    links = {link["name"]: link for link in json.loads((released / "parity.json").read_text())["links"]}
    assert any(link.get("ties") is not None for link in links.values()), links
    reduced, dense = (load_checkpoint(released / name).model for name in ("reduced", "dense"))
    assert traced_model.merging_of(reduced) == Merging(schedule=(2, 4))
    assert traced_model.merging_of(dense) is None
    images = torch.from_numpy(tiny.images(4, seed=1))
    with torch.inference_mode():
        assert not torch.equal(reduced(images), traced_model.with_merging(reduced, None)(images))


@pytest.mark.slow("graph")
def test_a_release_says_how_it_merges_wherever_it_tells_of_the_model(released: Path) -> None:
    record = json.loads((released / "reduced" / "config.json").read_text())["lineage"]["reduction"]["merging"]
    assert (record["schedule"], record["tokens"]) == ([2, 4], [17, 15, 11])
    card, report = ((released / name).read_text() for name in ("MODEL_CARD.md", "report.md"))
    assert "tokens merged away by block: `2,4`" in card
    assert "| 1 | 15 | 4 | 11 |" in card
    assert "| block 1 | 15 | 4 | 11 |" in report
    for text in (card, report, (released / "report.html").read_text()):
        assert "17 tokens become 11" in text
    assert json.loads((released / "manifest.json").read_text())["tokens"] == "merged: 2,4, compared by ward"
    assert "--merge-tokens 2,4" in card
