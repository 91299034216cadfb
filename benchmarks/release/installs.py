"""The wheel in clean environments, with the lowest versions that its metadata allows and with the newest ones.

python -m benchmarks.release.installs lowest          build/lowest: pip installs the wheel of dist/, the demo runs
python -m benchmarks.release.installs lowest --tests  and then the tests of this tree, with that environment's packages
python -m benchmarks.release.installs highest --python python3.13

Each run writes its part of benchmarks/results/dist.json after every step, so that its tests can read the earlier steps.
The exit code is 1 if a step fails.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
from packaging.utils import canonicalize_name

from benchmarks.release.floors import constraints, testing
from benchmarks.release.licences import ROOT
from benchmarks.release.sdist import metadata
from ground.files import write_json, write_text

RECORD = Path(__file__).parents[1] / "results" / "dist.json"
KIND = "corp-deploy/dist"
SERVER = ROOT / ".venv" / "triton"
# Extras that can be installed together: `gpu` has another ONNX Runtime, `genai` needs a newer one than the lower bound.
EXTRAS = ("cpu", "data", "demo", "hf", "interop", "openvino", "rtx", "sign")
MANIFEST = """
import sys
from pathlib import Path
from corp_deploy.store.manifest import load_manifest
from ground.files import sha256_of_file
root = Path(sys.argv[1])
files = load_manifest(root / "manifest.json").files
other = [name for name, entry in files.items() if sha256_of_file(root / name) != entry.sha256]
raise SystemExit(f"{root}: not what the manifest says: {other or 'no file'}" if other or not files else 0)
"""
Command = Sequence[str | Path]


def outcome(junit: Path) -> dict[str, Any]:
    """Return the counts of a run of pytest, and its failed tests."""
    (suite,) = ElementTree.parse(junit).getroot().iter("testsuite")
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    wrong = [case for case in suite.iter("testcase") if {"failure", "error"} & {part.tag for part in case}]
    return {
        "passed": count["tests"] - count["failures"] - count["errors"] - count["skipped"],
        "failed": count["failures"] + count["errors"],
        "skipped": count["skipped"],
        "failing": sorted(f"{case.get('classname')}::{case.get('name')}" for case in wrong),
    }


def steps(home: Path, wheel: Path, held: Command, junit: Path | None) -> dict[str, Command]:
    """Return the command of each step."""
    python, tool, demo = home / "bin" / "python", home / "bin" / "corp-deploy", home / "demo"
    install: Command = [python, "-m", "pip", "install", "--quiet", *held, f"{wheel}[{','.join(EXTRAS)}]"]
    check: Command = [python, "-m", "pip", "check"]
    use: dict[str, Command] = {
        "install": install,
        "pip check": check,
        "doctor": [tool, "doctor"],
        "demo": [tool, "demo", "--output", demo],
        "manifest": [python, "-c", MANIFEST, demo],
    }
    if junit is None:
        return use
    tools = [str(each).partition(";")[0] for each in testing(metadata(wheel))]
    alike = ["--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0"]
    return use | {
        "install tools": [*install, *tools],
        "pip check of tools": check,
        "tests": [
            python,
            "-m",
            "pytest",
            "--quiet",
            f"--rootdir={ROOT}",
            f"--junitxml={junit}",
            *alike,
            ROOT / "tests",
        ],
    }


def run(commands: Mapping[str, Command], cwd: Path) -> Iterator[list[dict[str, Any]]]:
    """Run commands until one fails, without this process's PYTHON variables; yield the finished steps after each."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done: list[dict[str, Any]] = []
    for name, command in commands.items():
        click.echo(f"--- {name}", err=True)
        start = time.monotonic()
        where, threads = (ROOT, {"OMP_NUM_THREADS": "1"}) if name == "tests" else (cwd, {})
        ended = subprocess.run(list(map(str, command)), cwd=where, env=environment | threads, check=False)
        done.append({"step": name, "exit_code": ended.returncode, "seconds": round(time.monotonic() - start, 1)})
        yield done
        if ended.returncode != 0:
            break


def _printed(*command: str | Path) -> str:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout.strip()


def environment(python: Path) -> dict[str, Any]:
    """Return the interpreter, and every package with its version."""
    listed = json.loads(_printed(python, "-m", "pip", "--disable-pip-version-check", "list", "--format", "json"))
    return {
        "python": _printed(python, "-c", "import platform; print(platform.python_version())"),
        "machine": f"{platform.system()} {platform.machine()}",
        "extras": list(EXTRAS),
        "packages": {canonicalize_name(each["name"]): each["version"] for each in listed},
    }


@click.command()
@click.argument("which", type=click.Choice(["lowest", "highest"]))
@click.option("--wheels", type=click.Path(path_type=Path, exists=True), default="dist", show_default=True)
@click.option("--python", default=sys.executable, help="The interpreter of the environment.")
@click.option("--tests", "tested", is_flag=True, help="Also run the tests there.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=RECORD, help="The record.")
def main(which: str, wheels: Path, python: str, tested: bool, output: Path) -> None:
    """Install the wheel into a new environment build/WHICH, and run the demo there."""
    (wheel,) = wheels.resolve().glob("*.whl")
    home = ROOT / "build" / which
    subprocess.run([python, "-m", "venv", "--clear", str(home)], check=True)
    held: list[str | Path] = []
    if which == "lowest":
        held = ["--constraint", home / "constraints.txt"]
        write_text(home / "constraints.txt", constraints(metadata(wheel)))
    junit = home / "tests.xml" if tested else None
    if tested and SERVER.is_dir():
        (home / SERVER.name).symlink_to(SERVER)  # the tests look for it in their interpreter's environment
    before = json.loads(output.read_text(encoding="utf-8"))["environments"] if output.exists() else {}
    for done in run(steps(home, wheel, held, junit), home):
        part: dict[str, Any] = {**environment(home / "bin" / "python"), "steps": done}
        if junit is not None and junit.exists():
            part["tests"] = outcome(junit)
        write_json(output, {"kind": KIND, "version": 1, "environments": {**before, which: part}})
    if done[-1]["exit_code"] != 0:
        raise SystemExit(f"{which}: {done[-1]['step']} ended with {done[-1]['exit_code']}")


if __name__ == "__main__":
    main()
