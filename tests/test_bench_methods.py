"""The methods benchmark runs, its record and its page agree; the procedural images are what they say."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.pages.methods_page import page
from benchmarks.quality import methods
from benchmarks.quality.methods_variants import KINDS, VARIANTS, Kind, Variant
from benchmarks.quality.procedural_images import CLASSES, made


@pytest.mark.slow("training")
def test_a_quick_run_writes_a_record_and_its_page(tmp_path: Path) -> None:
    methods.main(["--quick", "--threads", "1", "--cache", str(tmp_path / "cache"), "--output", str(tmp_path / "out")])
    record = json.loads((tmp_path / "out" / "methods.json").read_text())
    assert (record["version"], record["kind"]) == (1, "methods-benchmark")
    rows = {(row["method"], row["kind"]): row for row in record["rows"]}
    assert len(rows) == len(record["rows"]) == sum(len(method.kinds) for method in VARIANTS)
    for kind in KINDS:
        here = [row for (_, row_kind), row in rows.items() if row_kind == kind and not row["component"]]
        assert len({(row["hidden"], row["qk"], row["v"]) for row in here}) == 1, kind
    assert rows["best", "joint"]["relative_error"] < rows["none", "joint"]["relative_error"]
    written = (tmp_path / "out" / "methods.md").read_text()
    assert written == page(record)
    assert f"{rows['best', 'joint']['relative_error']:.4f}" in written


def test_a_stopped_run_goes_on_from_its_last_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = [
        {"method": method.name, "kind": kind, "sparsity": sparsity, "digest": method.digest()}
        for method, kind, sparsity in methods.plan((0.5,))
    ]
    (tmp_path / "rows-digits-0-24.json").write_text(json.dumps(done))
    subject = methods.digits(tmp_path, 10)
    monkeypatch.setattr(methods, "Bench", None)  # nothing is missing, so nothing is calibrated
    assert methods.measured(subject, 0, (0.5,), 24, tmp_path) == done


def test_a_row_is_made_again_when_its_method_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = ("grail", "fold", "best, closed loop")
    done = [
        {
            "method": method.name,
            "kind": kind,
            "sparsity": sparsity,
            "digest": "of old" if method.name in stale else method.digest(),
        }
        for method, kind, sparsity in methods.plan((0.5,))
    ]
    (tmp_path / "rows-digits-0-24.json").write_text(json.dumps(done))
    asked: list[str] = []

    def make(_: object, method: Variant, kind: Kind, sparsity: float) -> methods.Row:
        asked.append(method.name)
        figures = dict.fromkeys(("accuracy", "agreement", "relative_error"), 0.0)
        return methods.Row(
            model="digits", seed=0, kind=kind, sparsity=sparsity, method=method.name, component=method.component,
            hidden=8, qk=4, v=4, digest=method.digest(), **figures,
        )  # fmt: skip

    monkeypatch.setattr(methods.Bench, "__init__", lambda *_: None)
    monkeypatch.setattr(methods.Bench, "row", make)
    subject = methods.digits(tmp_path, 10)
    rows = methods.measured(subject, 0, (0.5,), 24, tmp_path)
    assert sorted(asked) == ["best, closed loop"] * 3 + ["fold", "grail"]
    assert len(rows) == len(done)
    assert methods.measured(subject, 0, (0.5,), 24, tmp_path) == rows


def test_the_digest_is_of_the_choices_and_the_code() -> None:
    digests = {method.name: method.digest() for method in VARIANTS}
    assert len(set(digests.values())) == len(digests)


@pytest.mark.parametrize(("sparsity", "hidden", "head"), [(0.5, 192, 16), (0.7, 112, 8), (0.875, 48, 4)])
def test_widths_are_the_same_for_every_method(sparsity: float, hidden: int, head: int) -> None:
    assert methods.kept(384, sparsity, methods.ALIGN_HIDDEN) == hidden
    assert methods.kept(32, sparsity, methods.ALIGN_HEAD) == head


def test_procedural_images_follow_from_their_number_alone() -> None:
    few, more = made("train", 3), made("train", 40)
    np.testing.assert_array_equal(few.images, more.images[:3])
    assert (few.images != made("held-out", 3).images).any()
    assert more.images.shape == (40, 3, 64, 64)
    assert more.images.dtype == np.float32
    assert float(np.abs(more.images).max()) < 3.0
    assert len(CLASSES) == 24
    assert len(set(made("train", 300).labels.tolist())) == 24
    with pytest.raises(ValueError, match="got 'test'"):
        made("test", 1)
