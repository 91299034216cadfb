"""The benchmark of start-up: which processes it starts, and what it makes of their seconds."""

import sys
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks.pages import startup_page
from benchmarks.speed import startup
from corp_deploy.cli import main


def test_help_of_every_command_is_timed() -> None:
    assert [words[:-1] for words in startup.helped().values()] == [name.split() for name in sorted(main.commands)]


def test_ratio_is_the_median_of_ratios_per_round() -> None:
    def seconds(*values: float) -> dict[str, list[float]]:
        return {"wall_s": [2 * each for each in values], "cpu_s": [*values]}

    by_name = {
        "import torch": seconds(1.0, 2.0, 4.0),
        "import torch, timm": seconds(2.0, 4.0, 8.0),
        "gate": seconds(0.5, 0.5, 0.4),
        "gate --help": seconds(0.1, 0.2, 0.4),
    }
    rows = {(row["command"], row["bytecode"]): row for row in startup.rows_of({True: by_name, False: by_name})}
    gate = rows["gate", True]
    assert (gate["cpu_s"], gate["wall_s"]) == (0.5, 1.0)
    assert gate["ratio"]["import torch"] == {"wall_s": 0.25, "cpu_s": 0.25}
    assert gate["ratio"]["import torch, timm"]["cpu_s"] == 0.125
    record: dict[str, Any] = {
        "rows": [*rows.values()], "threads": 1, "images": 32, "rounds": {"with": 3, "without": 3},
        "environment": {"cpu": "a processor", "load_average": 0.5},
    }  # fmt: skip
    page = startup_page.startup(record)
    assert "| `gate` | 0.50 | 1.00 | 0.25 | 0.12 | 0.50 |" in page
    assert "| `--help` of 1 commands | 0.20 | 0.40 | 0.10 | 0.05 | 0.20 |" in page


def test_rounds_alternate_direction_per_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[str, str]]()

    def timed(command: list[str], variables: dict[str, str]) -> dict[str, float]:
        seen.append((command[0], variables["kind"]))
        return {"wall_s": 1.0, "cpu_s": float(len(seen))}

    monkeypatch.setattr(startup, "timed", timed)
    kinds = {True: {"kind": "with"}, False: {"kind": "without"}}
    samples = startup.measured({"a": ["a"], "b": ["b"]}, kinds, {True: 2, False: 1})
    assert "".join(name for name, _ in seen) == "aabbba"
    assert samples[True]["a"]["cpu_s"] == [1.0, 6.0]
    assert [len(each["cpu_s"]) for each in samples[False].values()] == [1, 1]


def test_failing_process_ends_the_benchmark(tmp_path: Path) -> None:
    variables = startup.environments(1, tmp_path)[False]
    assert variables["PYTHONPYCACHEPREFIX"] == str(tmp_path)
    assert startup.timed([sys.executable, "-c", "raise SystemExit(3)"], variables)["wall_s"] > 0
    with pytest.raises(click.ClickException, match=r"ended with 1: .*no good"):
        startup.timed([sys.executable, "-c", "raise SystemExit('no good')"], variables)
    assert list(tmp_path.iterdir()) == []
