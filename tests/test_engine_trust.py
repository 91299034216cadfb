"""Engines are loaded where they were built, or where somebody says that they may be; a changed one never is."""

import stat
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from corp_deploy.proof.engine_trust import record_of_trusted_plan, trusting_engines
from corp_deploy.store.checkpoint import save
from export.engine.record import record_of_plan, sha256_of
from ground.built_engines import engine_list_path, is_built_here, record_built_engine
from ground.errors import BadInput
from perf.runners.engine import EngineRunner
from tests import tiny
from tests.command import invoked, refuses, run
from tests.export_served import write_onnx, write_plan
from tests.refusals import rejects

LIBRARIES = ("tensorrt", "tensorrt_rtx", "tensorrt_bindings")


class NoLibrary:
    """Stands before every other importer: nobody may ask for a library that loads engines."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        assert name.partition(".")[0] not in LIBRARIES, f"{name} is imported"
        return None


@pytest.fixture(autouse=True)
def _own_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in [each for each in sys.modules if each.partition(".")[0] in LIBRARIES]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NoLibrary(), *sys.meta_path])


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return write_plan(tmp_path / "m.plan", write_onnx(tmp_path / "m.onnx"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


def forget() -> None:
    engine_list_path().unlink()


def commands(plan: Path, folder: Path) -> list[list[object]]:
    """Every command that is handed an engine to run."""
    return [
        ["bench", plan, plan, "-o", folder / "b.json"],
        ["verify", plan, plan, "--random", 4, "-o", folder / "p.json"],
        ["verify", plan, "--random", 4, "--write-golden", folder / "golden"],
        ["verify", folder / "dense", plan, "--random", 4, "-o", folder / "p.json"],
    ]


def test_flipped_byte_is_refused_before_deserialisation(plan: Path, tmp_path: Path) -> None:
    save(tiny.checkpoint(), tmp_path / "dense")
    flip(plan)
    for words in commands(plan, tmp_path):
        for trust in ([], ["--trust-engine"]):
            refuses("m.plan: its bytes are not those that m.plan.json describes", *words, *trust)
            assert not [path for path in tmp_path.iterdir() if path.name in ("b.json", "p.json", "golden")]


def test_foreign_engine_needs_trust(plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record came with it, and says of it whatever its maker wanted."""
    save(tiny.checkpoint(), tmp_path / "dense")
    forget()
    for words in commands(plan, tmp_path):
        done = invoked(*words, code=2)
        assert "m.plan: it was not built here" in done.stderr
        assert "give --trust-engine if you trust whoever built it" in done.stderr
    monkeypatch.setattr("perf.runners.engine._tensorrt", no_library)
    for words in commands(plan, tmp_path):
        done = run(*words, "--trust-engine")
        assert done.exit_code in (2, 4), done.output  # what stands in for a plan is none
        assert "was not built here" not in done.stderr
    assert "the library is asked" in run(*commands(plan, tmp_path)[2], "--trust-engine").stderr


def no_library(backend: str) -> None:
    raise BadInput(f"the library is asked for {backend}")


def test_locally_built_engine_is_trusted_anywhere(plan: Path, tmp_path: Path) -> None:
    assert record_of_trusted_plan(plan) == record_of_plan(plan)
    (tmp_path / "there").mkdir()
    for name in ("m.plan", "m.plan.json"):
        (tmp_path / name).rename(tmp_path / "there" / name)
    assert record_of_trusted_plan(tmp_path / "there" / "m.plan").plan_bytes == 11


def test_trust_ends_with_the_command(plan: Path) -> None:
    forget()
    with trusting_engines(True):
        record_of_trusted_plan(plan)
    rejects("it was not built here", record_of_trusted_plan, plan)


def test_plan_without_a_record_is_foreign(plan: Path) -> None:
    plan.with_name("m.plan.json").unlink()
    with trusting_engines(True), pytest.raises(BadInput, match="no engine record beside it"):
        record_of_trusted_plan(plan)


def test_loaded_bytes_are_the_checked_ones(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever puts another plan there in the meantime gains nothing."""
    known = sha256_of(plan.read_bytes())
    flip(plan)
    rejects("its bytes are not those of its record", EngineRunner(plan, sha256=known).__enter__)
    flip(plan)
    monkeypatch.setattr("perf.runners.engine._tensorrt", no_library)
    rejects("the library is asked", EngineRunner(plan, sha256=known).__enter__)


def test_list_of_built_engines_is_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record_built_engine("a" * 64)
    path = engine_list_path()
    assert path == tmp_path / "state" / "corp-deploy" / "engines"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with path.open("a") as lines:
        lines.write("b" * 30)  # cut short by a full disk
    record_built_engine("c" * 64)
    assert is_built_here("a" * 64)
    assert is_built_here("c" * 64)
    assert not is_built_here("b" * 64)
    assert not is_built_here("b" * 30 + "c" * 34)
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert engine_list_path() == tmp_path / "home" / ".local" / "state" / "corp-deploy" / "engines"


def test_unwritable_list_makes_engines_foreign(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    record_built_engine("a" * 64)
    assert not is_built_here("a" * 64)
