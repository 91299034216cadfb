"""Lines that name what a silent command is at: once each, not under bars, not for machines."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import cast

import pytest

from corp_deploy.views.console import Output
from corp_deploy.views.waiting import PHASES, Waiting, phase_of, waits_quietly

ROOT = Path(__file__).parents[1]
Place = tuple[str, str] | str
"""A module and a function at work, or the name of a module that is imported."""


def frames(*places: Place) -> list[FrameType]:
    """Frames at these places, the innermost first."""

    def frame(place: Place) -> FrameType:
        names: Mapping[str, object]
        if isinstance(place, str):
            code, module, names = (
                ("_find_and_load", "<frozen importlib._bootstrap>"),
                "importlib._bootstrap",
                {"name": place},
            )
        else:
            code, module, names = (place[1], "x.py"), place[0], {}
        return cast(FrameType, SimpleNamespace(
            f_code=SimpleNamespace(co_name=code[0], co_filename=code[1]), f_globals={"__name__": module}, f_locals=names
        ))  # fmt: skip

    return [frame(place) for place in places]


COMMAND: Place = ("corp_deploy.commands.calibrate", "calibrate")


@pytest.mark.parametrize(
    ("places", "phase"),
    [
        ([COMMAND], "working"),
        ([], "working"),
        (["sympy", ("torch", "<module>"), "torch", ("calib.inputs", "<module>"), "calib.inputs", COMMAND],
         "loading torch"),
        (["sympy", ("torch.export", "trace"), ("corp_deploy.traced.programs.tracing", "trace"), COMMAND],
         "tracing the model"),
        ([("torch.nn", "call"), "timm", ("corp_deploy.families.timm_library", "build"), COMMAND], "loading timm"),
        ([("timm.models", "create"), ("corp_deploy.families.timm_library", "build"), COMMAND], "reading the model"),
        ([("calib.images", "read"), ("corp_deploy.store.input_sets", "open"), COMMAND], "reading the inputs"),
        ([("corp_deploy.release.recipe_checks", "read_inputs"), COMMAND], "checking what the recipe names"),
    ],
)  # fmt: skip
def test_phase_is_the_innermost_own_package_or_imported_library(places: Sequence[Place], phase: str) -> None:
    assert phase_of(frames(*places)) == phase


def test_phases_name_existing_packages() -> None:
    for module in PHASES:
        path = ROOT / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), module


def test_waiting_line_appears_after_two_seconds_once_per_phase(capsys: pytest.CaptureFixture[str]) -> None:
    now, at, said = [0.0], frames("torch", COMMAND), list[str]()
    waiting = Waiting(say=said.append, clock=lambda: now[0], frames=lambda: at)
    out = Output(json=False, quiet=False, waiting=waiting)

    def after(seconds: float) -> list[str]:
        now[0] += seconds
        waiting.look()
        lines, said[:] = list(said), []
        return lines

    assert after(1.9) == []
    assert after(0.2) == ["loading torch ..."]
    assert after(9.0) == [], "the same phase is not told again"
    at[:] = frames(("corp_deploy.traced.programs.tracing", "trace"))
    out.note("read")
    assert after(1.9) == []
    with out.progress("calibrating", 3):
        assert after(99.0) == []
    assert after(1.9) == []
    assert after(0.2) == ["tracing the model ..."]
    assert "read" in capsys.readouterr().err


def test_waiting_lines_appear_only_on_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert not waits_quietly(["corp-deploy", "calibrate"])
    for flag in ("-q", "--quiet", "--json"):
        assert waits_quietly(["corp-deploy", "calibrate", flag])
    monkeypatch.setenv("RANK", "1")
    assert waits_quietly(["corp-deploy", "calibrate"])


SLOW = """
import sys
from corp_deploy.views import waiting
waiting.AFTER_S = 0.08
import corp_deploy.commands.doctor as doctor
from corp_deploy import machine
def record():
    until = __import__("time").monotonic() + 0.4
    while __import__("time").monotonic() < until: pass
    return {"findings": []}
machine.build_record = record
sys.argv = ["corp-deploy", "doctor", *sys.argv[1:]]
from corp_deploy.__main__ import main
main()
"""


@pytest.mark.parametrize(("flags", "expected"), [((), "working ...\n"), (("--json",), ""), (("--quiet",), "")])
def test_long_command_reports_its_phase(flags: tuple[str, ...], expected: str) -> None:
    done = subprocess.run([sys.executable, "-c", SLOW, *flags], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == expected
