"""The worked example runs as it stands, and its page shows all of it."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.pages.worked import SCRIPT, worked


def test_the_script_runs_where_it_is_put(tmp_path: Path) -> None:
    script = tmp_path / "worked.py"
    script.write_text(SCRIPT.read_text())
    own = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script.name]
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "400 images fitted to, 12 sites" in done.stdout
    assert "PASS (4 links judged) on 500 images" in done.stdout
    assert (tmp_path / "worked" / "bench.json").is_file()


def test_the_page_shows_every_line_of_it() -> None:
    shown = worked()
    for line in SCRIPT.read_text().splitlines():
        assert line.startswith("# %%") or line.removeprefix("# ") in shown, line
    assert shown.count("```python") == shown.count("```") / 2 > 5
