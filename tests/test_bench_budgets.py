"""The benchmark of budgets, on a model that takes seconds: rows by both curves, kept and shown;
the bound on the gate's false alarms, and the slope of memory in long runs.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from scipy.stats import binom

from benchmarks.pages.accuracy_page import budgets as table
from benchmarks.quality import budgets, polish
from benchmarks.speed.gate_alarms import document, most_alarms, tally
from benchmarks.speed.long_runs import slope
from corp_deploy.reduction.method import method_from_preset

from . import tiny

pytestmark = pytest.mark.nightly


def subject(scratch: Path) -> polish.Subject:
    dense = tiny.checkpoint()
    dense.model.requires_grad_(False)
    judged = torch.from_numpy(tiny.images(16, seed=3))
    return polish.Subject(
        name="tiny", dense=dense, inputs=tiny.opened(scratch / "images.npy", tiny.images(32), dense.model),
        groups_B=None, method=method_from_preset("best", align_hidden=16, align_head=8), closed_loop=False,
        error=partial(polish.error, polish.outputs(dense.model, judged), judged),
    )  # fmt: skip


@pytest.mark.slow("models")
def test_rows_are_made_by_both_curves_kept_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "SUBJECTS", {"tiny": subject})
    output = tmp_path / "budgets.json"
    for shares in ("0.7", "0.7,0.5"):
        words = ["--output", str(output), "--models", "tiny", "--shares", shares]
        done = CliRunner().invoke(budgets.main, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    record = json.loads(output.read_text())
    assert [row["share"] for row in record["rows"]] == [0.7, 0.5]
    for row in record["rows"]:
        assert min(row[way] for way in budgets.WAYS) > 0.0
        tried = {name: error for name, error in row["ways"].items() if name.startswith("by site")}
        assert row["taken_is"] == min(tried, key=tried.__getitem__)
    assert f"| tiny | 0.7 | {record['rows'][0]['before']:.4f} |" in table(record)


def one(verdict: str, *, low: float | None = 0.99, processes: int = 1) -> dict[str, Any]:
    load = {"kinds": ["compute"] * processes, "busy_s": None}
    return {"verdict": verdict, "low": low, "high": 1.01, "seconds": 2.0, "naive_speedup": 1.0, "load": load}


def test_at_the_bound_so_few_alarms_come_once_in_twenty() -> None:
    """Three hundred without an alarm say below one percent, and fewer do not."""
    for alarms, comparisons in ((0, 40), (0, 300), (2, 320)):
        assert binom.cdf(alarms, comparisons, most_alarms(alarms, comparisons)) == pytest.approx(0.05, rel=1e-6)
    assert most_alarms(0, 300) < 0.01 < most_alarms(0, 297)
    assert most_alarms(3, 3) == 1.0


def test_verdicts_and_intervals_are_counted() -> None:
    found = tally([one("PASS"), one("INCONCLUSIVE", low=None), one("FAIL", low=1.005)])
    assert (found["PASS"], found["FAIL"], found["INCONCLUSIVE"]) == (1, 1, 1)
    assert (found["intervals"], found["intervals_that_hold_one"]) == (2, 1)
    apart = document([one("PASS", processes=0), one("PASS", processes=3)], seed=0)["by_processes"]
    assert {count: each["comparisons"] for count, each in apart.items()} == {"0": 1, "3": 1}


@pytest.mark.parametrize("rate", [0.0, 3.0])
def test_the_slope_of_a_line_with_a_beginning_and_a_spike(rate: float) -> None:
    done = np.arange(100, 10_001, 100.0)
    mib = 300.0 + rate * done / 1000
    mib[:20] = np.linspace(0, 300, 20)  # what is loaded first is no growth
    mib[50] += 400.0
    noise = np.random.default_rng(0).normal(0, 0.1, len(mib))
    found = slope(list(zip(done, mib + noise, strict=True)))
    assert found["mib_per_1000"] == pytest.approx(rate, abs=0.02)
    assert found["low"] <= rate <= found["high"]
    assert found["high"] - found["low"] < 0.1
