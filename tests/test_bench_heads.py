"""The benchmarks of rotated and of whole heads, on a tiny model."""

from pathlib import Path

import pytest
import torch

from benchmarks.pages import heads_page
from benchmarks.quality import rotation, whole_heads
from benchmarks.quality.layer_polish import Subject
from corp_deploy.families.family import sites_of
from tests import tiny
from tests.test_corp_rotation import moments


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    home = tmp_path_factory.mktemp("bench")
    model = tiny.checkpoint().model.requires_grad_(False)
    inputs, judging = (tiny.opened(home / f"{seed}.npy", tiny.images(24, seed=seed), model) for seed in (0, 1))
    return Subject(name="tiny", dense=model, inputs=inputs, judging=judging, align=8, newton=(), adam=())


def test_int8_has_255_values_of_one_scale() -> None:
    x = torch.tensor([-2.0, -1.0, 0.004, 0.009, 1.3, 5.0])
    got = rotation.rounded(x, 2.0)
    assert got.tolist() == pytest.approx([-2.0, -1.0079, 0.0, 0.01575, 1.3071, 2.0], abs=1e-4)


def test_a_rotation_is_measured_in_every_precision(subject: Subject) -> None:
    plain, turned = rotation.rows_of(subject, moments(), 0.5)
    assert (plain["rotates"], turned["rotates"], plain["width"]) == (False, True, 8)
    assert plain["fp32"] == 0.0
    assert 0.0 < turned["fp32"] < 1e-5
    for row in (plain, turned):
        assert 1e-5 < row["fp16"] < 1e-2
        assert all(1e-4 < row[name] < 0.1 for name in ("int8_logits", "int8_qk", "int8_v"))
    said = heads_page.rotation({"rows": [plain, turned]})
    assert "tiny, heads of 8" in said


def test_whole_heads_stand_beside_narrower_ones(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = {"kernels": 9, "plan_bytes": 2_000_000, "fused_attention": 2, "attention_sites": 2, "library_version": "1"}
    monkeypatch.setattr(whole_heads, "engine", lambda model, scratch: built)
    tokens = whole_heads.tokens_of(subject)
    assert tokens == 17
    rows = [
        whole_heads.row_of(subject, moments(), variant, 2, tmp_path)
        for variant in whole_heads.variants(subject.dense, 2, tokens)
    ]
    assert [(row["way"], row["heads"], row["qk"], row["v"]) for row in rows] == [
        ("whole heads", 2, 16, 16),
        ("whole heads, grail", 2, 16, 16),
        ("square", 3, 8, 8),
        ("square", 3, 16, 16),
        ("padded Q/K", 3, 8, 16),
    ]
    assert rows[0]["attention_macs"] == pytest.approx(2 / 3)
    assert rows[2]["attention_macs"] == pytest.approx(1 / 2)
    assert rows[3]["error"] < 1e-5
    assert rows[0]["error"] < rows[1]["error"]
    text = heads_page.whole_heads({"rows": rows})
    assert "| tiny | whole heads | 2 of 16 | 0.67 |" in text
    assert "2 of 2 | 9 | 2.0 |" in text
    assert len(sites_of(subject.dense).heads) == 2
