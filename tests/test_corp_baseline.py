"""The gate reports whether its record becomes the baseline, and if not, why."""

from pathlib import Path

import pytest

from perf.record.runs import save_bench
from tests.command import invoked
from tests.histories import bench_of_release


@pytest.fixture
def words(tmp_path: Path) -> tuple[object, ...]:
    """Return the words of a gate command that starts a baseline."""
    save_bench(bench_of_release(0, 4.0, batches=(1,)), tmp_path / "bench.json")
    return ("gate", tmp_path / "bench.json", "--baseline", tmp_path / "base.json", "--init-baseline")


@pytest.mark.parametrize(
    ("rule", "verdict", "code"),
    [("p50@b1 > 0", "FAIL", 1), ("peak_memory_bytes@b1 > baseline", "INCONCLUSIVE", 3)],
)
def test_unwritten_baseline_is_reported_with_the_reason(
    words: tuple[object, ...], rule: str, verdict: str, code: int, tmp_path: Path
) -> None:
    done = invoked(*words, "--fail-if", rule, "--quiet", code=code)
    said = " ".join(done.stderr.split())
    assert f"warning: {tmp_path / 'base.json'}: baseline not written, because the gate is {verdict} ({rule}: " in said
    assert "the first record that passes becomes it: measure again, or correct the rule" in said
    assert not (tmp_path / "base.json").exists()


def test_written_baseline_is_reported(words: tuple[object, ...], tmp_path: Path) -> None:
    done = invoked(*words, "--fail-if", "p50@b1 > baseline")
    assert "is the baseline now" in done.stderr
    assert "not written" not in done.stderr
    assert (tmp_path / "base.json").is_file()
    assert "not written" not in invoked(*words, "--fail-if", "p50@b1 > baseline").stderr


def test_nothing_is_reported_without_the_option(words: tuple[object, ...]) -> None:
    assert "not written" not in invoked(*words[:2], "--fail-if", "p50@b1 > 0", code=1).stderr
