"""The harness of all benchmarks: it keeps, chooses and repeats rows, and makes tables of them."""

import json
from pathlib import Path

import click
from click.testing import CliRunner

from benchmarks.harness import Bench, measures
from benchmarks.pages.markdown import Column, table_of
from ground.errors import Missing


def figures(number: int, addend: int) -> dict[str, float]:
    if number == 3:
        raise Missing("no third machine")
    return {"sum": float(number + addend)}


@measures("benchmarks/sums")
@click.option("--addend", default=1)
def command(bench: Bench, addend: int) -> None:
    """Add up."""
    bench.share(addend=addend)

    for number in (1, 2, 3):
        bench.row({"number": number}, figures, number, addend)


def run(path: Path, *words: str) -> str:
    result = CliRunner().invoke(command, ["-o", str(path), *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_rows_are_kept_selected_and_remade(tmp_path: Path) -> None:
    path = tmp_path / "sums.json"
    assert "1: sum 2" in run(path, "--only", "1")
    assert run(path) == "2: sum 3\n3: skipped, no third machine\n"
    assert run(path, "--again", "--only", "1") == "1: sum 2\n"
    record = json.loads(path.read_text())
    assert (record["kind"], record["version"], record["addend"]) == ("benchmarks/sums", 1, 1)
    assert record["versions"]["torch"]
    assert record["cpu"]
    assert record["rows"] == [{"number": 1, "sum": 2.0}, {"number": 2, "sum": 3.0}]


def test_rows_of_another_setting_are_refused_or_replaced_on_request(tmp_path: Path) -> None:
    path = tmp_path / "sums.json"
    run(path)
    result = CliRunner().invoke(command, ["-o", str(path), "--addend", "5"])
    assert (result.exit_code, "measured with another addend" in result.output) == (1, True)
    run(path, "--addend", "5", "--again")
    assert json.loads(path.read_text())["rows"][0]["sum"] == 6.0


def test_tables_format_fields_and_show_none_as_a_dash() -> None:
    rows = [{"name": "a", "error": 0.25, "fused": None}]
    columns: dict[str, Column] = {
        "name": "{name}",
        "error": "{error:.1f}",
        "fused": "{fused}",
        "twice": lambda row: row["name"] * 2,
    }
    assert table_of(rows, columns).splitlines()[-1] == "| a | 0.2 | - | aa |"
