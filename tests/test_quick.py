"""The quick run: it names a test that takes too long without a reason, and leaves out those that have one."""

import ast
import gc
import json
import re
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from types import FunctionType

import pytest

from benchmarks.suite import rooms
from benchmarks.suite.mutations import ROOMS, ROOT, mutants_of, plant_, sample
from benchmarks.suite.record import MOST_BELOW, RECORD
from tests import quick

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
def test_a_run_fails_with_the_names_of_tests_that_take_too_much_of_it(
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


def test_of_few_tests_or_of_all_any_may_take_its_time(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(BUSY)
    assert pytester.runpytest_inprocess(*ORDERED).ret == pytest.ExitCode.OK
    assert pytester.runpytest_inprocess("-p", "tests.quick").ret == pytest.ExitCode.OK


@pytest.mark.parametrize("reasons", ["", '"because"', '"graph", "because"'])
def test_a_marker_without_a_reason_is_refused(pytester: pytest.Pytester, reasons: str) -> None:
    pytester.makepyfile(f"import pytest\n@pytest.mark.slow({reasons})\ndef test_it(): pass")
    result = pytester.runpytest_inprocess("-p", "tests.quick")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*test_it: slow(*give one or more of graph, server*"])


def test_ci_runs_quick_and_slow_tests_and_the_nightly_workflow_all() -> None:
    make = (ROOT / "Makefile").read_text()
    assert f'$(PYTEST) -m "{quick.QUICK}"' in make
    assert f'$(PYTEST) -m "{quick.SLOW}"' in make
    assert "$(PYTEST) -m nightly\n" in make
    assert "$(PYTEST)\n" in make
    assert (ROOT / ".ci" / "run").read_text().split("\n")[-3:] == ["make test", "make test-slow", ""]
    assert "run: make test-all\n" in (ROOT / ".github" / "workflows" / "nightly.yml").read_text()


def test_documents_state_the_recorded_minutes_of_make_test() -> None:
    seconds = json.loads(RECORD.read_text(encoding="utf-8"))["make"]["make test"]["wall_s"]
    sentence = f"{ceil(seconds / 60)} minutes on two cores"
    for text in ((ROOT / "README.md").read_text(), (ROOT / "CONTRIBUTING.md").read_text(), str(quick.__doc__)):
        assert sentence in " ".join(text.split())


def test_no_planted_fault_that_was_found_before_survives() -> None:
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    for part, before in recorded["mutants_before"].items():
        now = {survivor.rpartition(":")[0] for survivor in recorded["mutants"][part]["survivors"]}
        assert now & set(before["caught"]) == set(), part


def test_every_reason_is_somebodys() -> None:
    used = {
        word
        for path in (ROOT / "tests").glob("test_*.py")
        for words in re.findall(r"mark\.slow\(([^)]*)\)", path.read_text())
        for word in re.findall(r'"(\w+)"', words)
    }
    assert used - {"because"} == quick.REASONS.keys()


# The tools that judge these tests: faults are planted where they are said to be, and what is recorded holds.

FILE = Path(rooms.__file__)


@pytest.fixture
def planted() -> Iterator[None]:
    """Every function of the file as it was."""
    gc.unfreeze()
    own = [each for each in gc.get_objects() if type(each) is FunctionType]
    codes = [(each, each.__code__) for each in own if each.__code__.co_filename == str(FILE)]
    yield
    for function, code in codes:
        function.__code__ = code


@pytest.mark.usefixtures("planted")
def test_each_fault_is_in_the_function_that_it_names() -> None:
    held = rooms.room_of  # as whoever imported it by name
    mutants = [mutant for mutant in mutants_of(FILE) if mutant.function == "room_of"]
    assert {mutant.fault for mutant in mutants} == {"0 is 1", "1 is 2", "Eq is NotEq", "And is Or", "without Not"}
    assert held(Path("corp_deploy/algebra/fold.py")) == "corp_deploy/algebra"
    plant_(next(mutant for mutant in mutants if mutant.fault == "Eq is NotEq"))
    assert held(Path("corp_deploy/algebra/fold.py")) == "corp_deploy"
    assert held(Path("perf/gate/rule.py")) == "perf/gate"


def test_mutants_are_other_programs_and_a_sample_is_always_the_same() -> None:
    path = ROOT / "corp_deploy" / "algebra" / "quadratic.py"
    mutants = mutants_of(path)
    assert len({mutant.key for mutant in mutants}) == len(mutants) > 20
    functions = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
    assert {mutant.function.rpartition(".")[2] for mutant in mutants} <= functions
    assert sample(mutants, 5) == sample(mutants[::-1], 5)


def test_quick_tests_run_nearly_all_of_every_room() -> None:
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))["rooms"]
    assert {name.partition("/")[0] for name in recorded} == {*ROOMS, "all"}
    below = {room: entry["whole"] - entry["quick"] for room, entry in recorded.items()}
    assert {room: points for room, points in below.items() if points > MOST_BELOW} == {}
