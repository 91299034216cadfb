"""`compare` puts two records side by side, and its exit code says whether they may be."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from corp_deploy.cli import main
from tests.test_perf_report import bench

Change = tuple[str, ...]


def compared(folder: Path, path: Change = (), value: object = None, *words: str) -> Result:
    """A record beside itself, with `value` put where `path` leads in the second."""
    before = bench()
    after: dict[str, Any] = copy.deepcopy(before)
    place: Any = after
    for key in path[:-1]:
        place = place[key]
    if path:
        place[path[-1]] = value
    for name, record in (("before", before), ("after", after)):
        (folder / f"{name}.json").write_text(json.dumps(record))
    files = [str(folder / f"{name}.json") for name in ("before", "after")]
    return CliRunner().invoke(main, ["bench", "compare", *files, *words])


def test_records_of_one_machine_exit_with_0(tmp_path: Path) -> None:
    result = compared(tmp_path)
    assert result.exit_code == 0, result.output
    assert "no difference" in result.stdout
    assert json.loads(compared(tmp_path, (), None, "--json").stdout)["comparable"] is True


def test_what_may_differ_is_shown_and_exits_with_0(tmp_path: Path) -> None:
    result = compared(tmp_path, ("environment", "load_average"), 3.0)
    assert result.exit_code == 0, result.output
    assert "| load_average | None | 3.0 |" in result.stdout


@pytest.mark.parametrize(("path", "key"), [(("environment", "cpu"), "cpu"), (("settings", "streams"), "streams")])
def test_what_may_not_differ_is_named_and_exits_with_5(tmp_path: Path, path: Change, key: str) -> None:
    """The figures are shown all the same."""
    result = compared(tmp_path, path, "another")
    assert result.exit_code == 5, result.output
    assert f"| {key} (decisive) |" in result.stdout
    assert "Not comparable" in result.stdout
    assert "| 8 | reduced |" in result.stdout
    record = json.loads(compared(tmp_path, path, "another", "--json").stdout)
    assert (record["comparable"], record["differences"][0]["key"]) == (False, key)
