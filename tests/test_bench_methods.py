"""The methods benchmark runs, its record and its page agree; the procedural images are what they say."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import methods
from benchmarks.methods_page import page
from benchmarks.procedural_images import CLASSES, made


def test_a_quick_run_writes_a_record_and_its_page(tmp_path: Path) -> None:
    methods.main(["--quick", "--threads", "1", "--cache", str(tmp_path / "cache"), "--output", str(tmp_path / "out")])
    record = json.loads((tmp_path / "out" / "methods.json").read_text())
    assert (record["version"], record["kind"]) == (1, "methods-benchmark")
    rows = {(row["method"], row["kind"]): row for row in record["rows"]}
    assert len(rows) == len(record["rows"]) == sum(len(method.kinds) for method in methods.METHODS)
    for kind in methods.KINDS:
        here = [row for (_, row_kind), row in rows.items() if row_kind == kind and not row["component"]]
        assert len({(row["hidden"], row["qk"], row["v"]) for row in here}) == 1, kind
    assert rows["best", "joint"]["relative_error"] < rows["none", "joint"]["relative_error"]
    written = (tmp_path / "out" / "methods.md").read_text()
    assert written == page(record)
    assert f"{rows['best', 'joint']['relative_error']:.4f}" in written


def test_a_stopped_run_goes_on_from_its_last_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = [
        {"method": method.name, "kind": kind, "sparsity": sparsity} for method, kind, sparsity in methods.plan((0.5,))
    ]
    (tmp_path / "rows-digits-0-24.json").write_text(json.dumps(done))
    subject = methods.digits(tmp_path, 10)
    monkeypatch.setattr(methods, "Bench", None)  # nothing is missing, so nothing is calibrated
    assert methods.measured(subject, 0, (0.5,), 24, tmp_path) == done


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
