"""Token merging in options, recipes, releases, records, reports, model cards and inspect."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calib.store import load_moments
from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs
from corp_deploy.families.inspection import inspection_of_model, merging_record
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.request import merging_from_choice
from corp_deploy.spec.merging import Merging
from corp_deploy.store.checkpoint import load_checkpoint
from corp_deploy.traced.models.parts import tokens_that_enter
from corp_deploy.views.inspection import merging_lines
from perf.report.content import Content, MergingLines
from perf.report.page import html_from_content
from perf.report.render import csv_from_content, markdown_from_content
from tests.command import invoked
from tests.recipes import RELEASE
from tests.refusals import rejects

from . import tiny


def test_record_and_inspect_list_tokens_and_macs_per_block() -> None:
    dense = tiny.checkpoint().model
    assert merging_record(dense) is None
    model = traced_model.with_merging(dense, Merging(schedule=(3, 4)))
    record, view = merging_record(model), inspection_of_model(model)
    assert record is not None
    assert (record.tokens, record.protected, record.rows) == ((17, 14, 10), 1, ((0, 17, 3, 14), (1, 14, 4, 10)))
    # 48 channels: 8 even tokens are compared with 8 odd ones, then 7 with 6; means of merged tokens take 3*8 and 4*6.
    assert record.macs_of_merging == 48 * (8 * 8 + 3 * 8 + 7 * 6 + 4 * 6)
    assert (record.macs, record.macs_with_all_tokens) == (macs(model), macs(dense))
    assert view["merging"].items() >= (Merging(schedule=(3, 4)).as_json() | {"schedule": (3, 4)}).items()
    assert (view["merging"]["tokens"], view["merging"]["macs_of_merging"]) == (record.tokens, record.macs_of_merging)
    by_name = {row["site"]: row["macs"] for row in view["sites"]} | {row["name"]: row["macs"] for row in view["fixed"]}
    assert by_name["blocks.0.mlp"] == 2 * 14 * 48 * 192
    assert by_name["blocks.1.mlp"] == 2 * 10 * 48 * 192
    assert by_name["blocks.1.attn.qk"] + by_name["blocks.1.attn.v"] == 14 * 48 * 4 * 48 + 2 * 3 * 14 * 14 * 16
    assert sum(by_name.values()) == view["macs"] < inspection_of_model(dense)["macs"]
    reach = {0: {"attn.qk": 17, "attn.v": 17, "mlp": 14}, 1: {"attn.qk": 14, "attn.v": 14, "mlp": 10}}
    expected = {f"blocks.{at}.{part}": count for at, own in reach.items() for part, count in own.items()}
    assert tokens_that_enter(model) == expected
    first, second = record.sentences()
    assert "most alike by what merging them changes in the residual stream: 17 tokens become 10, 1 of them" in first
    assert f"{macs(model) / macs(dense):.1%} of the multiply-adds" in second
    assert merging_lines(view) == [first, second, "tokens behind each block: 14 10"]
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
def test_every_merge_method_has_a_description(merging: Merging, words: str) -> None:
    record = merging_record(traced_model.with_merging(tiny.checkpoint().model, merging))
    assert record is not None
    assert words in " ".join(record.sentences())


def test_report_shows_tokens_per_block() -> None:
    sentences = ("each block merges <them>: 17 tokens become 10", "this takes 70%")
    merging = MergingLines(verb="merged", sentences=sentences, blocks=((0, 17, 3, 14), (1, 14, 4, 10)))
    content = Content(title="a", merging=merging)
    text = markdown_from_content(content)
    assert "Each block merges" in text
    assert "| block 1 | 14 | 4 | 10 |" in text
    assert "This takes 70%." in text
    page = html_from_content(content)
    assert "&lt;them&gt;" in page
    assert "<th" in page
    assert "merging,block 1,,,tokens_behind,10" in csv_from_content(content).replace(".0", "")
    assert "Tokens by block" not in markdown_from_content(Content(title="a"))


@pytest.mark.slow("graph")
def test_release_of_a_merged_model_reports_its_verdict_and_schedule(tmp_path: Path) -> None:
    home, released = tiny.written(tmp_path, 12, to="calibration.npy"), tmp_path / "out"
    np.savez(home / "held-out.npz", images=tiny.images(9, seed=1), labels=np.arange(9) % 7)
    (home / "recipe.toml").write_text(RELEASE.replace("attn = 0.5", 'merge_tokens = "2,4"'))
    invoked("release", home / "recipe.toml", "-o", released)
    (moments,) = released.rglob("moments.safetensors")
    assert json.loads(load_moments(moments).lineage["merging"])["schedule"] == [2, 4]
    assert json.loads((released / "gate.json").read_text())["verdict"] == "PASS"
    links = {link["name"]: link for link in json.loads((released / "parity.json").read_text())["links"]}
    assert any(link.get("ties") is not None for link in links.values()), links
    reduced, dense = (load_checkpoint(released / name).model for name in ("reduced", "dense"))
    assert traced_model.merging_of(reduced) == Merging(schedule=(2, 4))
    assert traced_model.merging_of(dense) is None
    images = tiny.images(4, seed=1)
    assert not torch.equal(tiny.ran(reduced, images), tiny.ran(traced_model.with_merging(reduced, None), images))
    record = json.loads((released / "reduced" / "config.json").read_text())["lineage"]["reduction"]["merging"]
    assert (record["schedule"], record["tokens"]) == ([2, 4], [17, 15, 11])
    card, report, page = ((released / name).read_text() for name in ("MODEL_CARD.md", "report.md", "report.html"))
    assert "tokens merged away by block: `2,4`" in card
    assert "| 1 | 15 | 4 | 11 |" in card
    assert "| block 1 | 15 | 4 | 11 |" in report
    assert all("17 tokens become 11" in text for text in (card, report, page))
    assert json.loads((released / "manifest.json").read_text())["tokens"] == "merged: 2,4, compared by ward"
    assert "--merge-tokens 2,4" in card


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"merge_tokens": "3"}, Merging(schedule=(3, 3))),
        ({"merge_tokens": "100"}, Merging(schedule=(8, 4))),
        ({"merge_tokens": "2,4", "merge_metric": "keys"}, Merging(schedule=(2, 4), metric="keys")),
        ({"merge_tokens": "grow:4", "merge_outputs": "unmerged"}, Merging(schedule=(0, 4), unmerged=True)),
        ({"merge_tokens": "100", "merge_how": "drop"}, Merging(schedule=(15, 0), how="drop")),
    ],
)
def test_merge_options_are_decoded(options: dict[str, Any], expected: Merging) -> None:
    model = tiny.checkpoint().model
    assert merging_from_choice(ReduceOptions.from_options(options), model) == expected


@pytest.mark.parametrize(
    ("options", "sparsities"),
    [({}, (None, None)), ({"closed_loop": True}, (0.0, 0.0)), ({"closed_loop": True, "mlp": 0.5}, (0.5, None))],
)
def test_merging_alone_repairs_only_in_a_closed_loop(
    options: dict[str, Any], sparsities: tuple[float | None, float | None]
) -> None:
    method = ReduceOptions.from_options({"merge_tokens": "3"} | options).method_asked
    assert (method.mlp_sparsity, method.attention_sparsity) == sparsities


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mlp": 0.5, "merge_metric": "keys"}, "--merge-metric keys has no effect on a model that keeps its tokens"),
        ({"merge_tokens": "3", "merge_how": "drop", "merge_metric": "keys"}, "has no effect on dropped tokens"),
        ({"merge_tokens": "3", "merge_how": "drop", "merge_outputs": "unmerged"}, "no value to restore"),
        ({"merge_tokens": "3", "preset": "fold", "mlp": 0.5}, "merged tokens have different weights"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], message: str) -> None:
    rejects(message, ReduceOptions.from_options, options)
