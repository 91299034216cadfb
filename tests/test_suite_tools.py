"""The tools that judge these tests: faults are planted where they are said to be, and what is recorded holds."""

import ast
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest

from benchmarks.suite import rooms
from benchmarks.suite.mutations import ROOMS, ROOT, mutants_of, plant_, sample
from benchmarks.suite.record import MOST_BELOW, RECORD

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


def test_a_fault_where_nothing_runs_is_an_error() -> None:
    mutant = mutants_of(ROOT / "examples" / "worked.py")
    assert mutant == [], "it has no functions"
    other = mutants_of(ROOT / "benchmarks" / "speed" / "harness_overhead.py")[0]
    with pytest.raises(LookupError, match="nothing in this process"):
        plant_(other)


def test_quick_tests_run_nearly_all_of_every_room() -> None:
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))["rooms"]
    assert {name.partition("/")[0] for name in recorded} == {*ROOMS, "all"}
    below = {room: entry["whole"] - entry["quick"] for room, entry in recorded.items()}
    assert {room: points for room, points in below.items() if points > MOST_BELOW} == {}
