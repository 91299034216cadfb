"""The quick run: it names a test that takes too long without a reason, and leaves out those that have one."""

import re

import pytest

from tests import quick
from tests.sources import ROOT

pytest_plugins = ("pytester",)
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
@pytest.mark.slow("graph", "process")
def test_slow(): busy()
"""


ORDERED = ("-p", "tests.quick", "-m", quick.QUICK)


@pytest.mark.parametrize("also", [[], pytest.param(["--numprocesses", "1"], marks=pytest.mark.slow("process"))])
def test_quick_run_fails_with_the_names_of_slow_tests(
    also: list[str], monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(BUSY)
    monkeypatch.setattr(quick, "FEWEST", 4)
    monkeypatch.setattr(quick, "SHARE", 0.25)
    result = pytester.runpytest_inprocess(*ORDERED, *also)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=4, deselected=0 if also else 1)
    result.stdout.fnmatch_lines(["*test_busy took 0.* s of the processor*of all of them*slow(reason)*"])
    text = result.stdout.str()
    assert "test_of_a_busy_fixture took" in text
    assert not re.search(r"test_(quick|waits|slow) took", text)


def test_small_and_full_runs_have_no_time_limit(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(BUSY)
    assert pytester.runpytest_inprocess(*ORDERED).ret == pytest.ExitCode.OK
    assert pytester.runpytest_inprocess("-p", "tests.quick").ret == pytest.ExitCode.OK


@pytest.mark.parametrize("reasons", ["", '"because"', '"graph", "because"'])
def test_slow_marker_without_a_reason_is_refused(pytester: pytest.Pytester, reasons: str) -> None:
    pytester.makepyfile(f"import pytest\n@pytest.mark.slow({reasons})\ndef test_it(): pass")
    result = pytester.runpytest_inprocess("-p", "tests.quick")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*test_it: slow(*give one or more of graph, server*"])


def test_ci_runs_quick_and_slow_tests_and_nightly_runs_all() -> None:
    make = (ROOT / "Makefile").read_text()
    assert f'$(PYTEST) -m "{quick.QUICK}"' in make
    assert f'$(PYTEST) -m "{quick.SLOW}"' in make
    assert "$(PYTEST) -m nightly\n" in make
    assert "$(PYTEST)\n" in make
    assert (ROOT / ".ci" / "run").read_text().split("\n")[-3:] == ["make test", "make test-slow", ""]
    assert "run: make test-all\n" in (ROOT / ".github" / "workflows" / "nightly.yml").read_text()


def test_every_reason_is_used() -> None:
    used = {
        word
        for path in (ROOT / "tests").glob("test_*.py")
        for words in re.findall(r"mark\.slow\(([^)]*)\)", path.read_text())
        for word in re.findall(r'"(\w+)"', words)
    }
    assert used - {"because"} == quick.REASONS.keys()
