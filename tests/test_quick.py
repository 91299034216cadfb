"""The quick run: it names a test that takes too long without a reason, and leaves out those that have one."""

import re
from pathlib import Path

import pytest

from tests import quick

pytest_plugins = ("pytester",)
ROOT = Path(__file__).parents[1]
BUSY = """
import time, pytest

def busy():
    began = time.process_time()
    while time.process_time() - began < 0.3:
        pass

@pytest.fixture(scope="module")
def shared():
    busy()

def test_quick(): pass
def test_busy(): busy()
def test_waits(): time.sleep(0.3)
def test_of_a_busy_fixture(shared): pass
def test_fails(): busy(); assert False
@pytest.mark.slow("graph", "process")
def test_slow(): busy()
"""


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester) -> pytest.Pytester:
    monkeypatch.setattr(quick, "LIMIT_S", 0.2)
    pytester.makepyfile(BUSY)
    return pytester


def test_a_test_that_takes_too_long_without_a_reason_fails_with_its_name(limited: pytest.Pytester) -> None:
    result = limited.runpytest_inprocess("-p", "tests.quick", "-m", quick.QUICK)
    result.assert_outcomes(passed=4, errors=3, failed=1, deselected=1)
    result.stdout.fnmatch_lines(["*test_busy took 0.* s of the processor*", "*slow(reason)*"])
    text = result.stdout.str()
    assert "test_of_a_busy_fixture took" in text
    assert not re.search(r"test_(quick|waits|slow) took", text)


def test_in_the_whole_run_any_test_may_take_its_time(limited: pytest.Pytester) -> None:
    limited.runpytest_inprocess("-p", "tests.quick").assert_outcomes(passed=5, failed=1)


@pytest.mark.parametrize("reasons", ["", '"because"', '"graph", "because"'])
def test_a_marker_without_a_reason_is_refused(pytester: pytest.Pytester, reasons: str) -> None:
    pytester.makepyfile(f"import pytest\n@pytest.mark.slow({reasons})\ndef test_it(): pass")
    result = pytester.runpytest_inprocess("-p", "tests.quick")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*test_it: slow(*give one or more of graph, server*"])


def test_what_make_leaves_out_is_run_before_anything_lands() -> None:
    make = (ROOT / "Makefile").read_text()
    assert f'$(PYTEST) -m "{quick.QUICK}"' in make
    assert "$(PYTEST) -m slow" in make
    assert (ROOT / ".ci" / "run").read_text().split("\n")[-3:] == ["make test", "make test-slow", ""]


def test_every_reason_is_somebodys() -> None:
    used = {
        word
        for path in (ROOT / "tests").glob("test_*.py")
        for words in re.findall(r"mark\.slow\(([^)]*)\)", path.read_text())
        for word in re.findall(r'"(\w+)"', words)
    }
    assert used - {"because"} == quick.REASONS.keys()
