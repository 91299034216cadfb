"""The worked example runs as it stands, and its page shows all of it."""

import runpy
from pathlib import Path

import pytest

from benchmarks.pages.worked import SCRIPT, worked


@pytest.mark.slow("graph", "measurement")
def test_the_script_runs_where_it_is_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    assert "400 images fitted to, 18 sites" in printed
    assert "PASS (4 links judged) on 500 images" in printed
    assert (tmp_path / "worked" / "bench.json").is_file()


def test_the_page_shows_every_line_of_it() -> None:
    shown = worked()
    for line in SCRIPT.read_text().splitlines():
        assert line.startswith("# %%") or line.removeprefix("# ") in shown, line
    assert shown.count("```python") == shown.count("```") / 2 > 5
