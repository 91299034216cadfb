"""requirements.lock: every package of constraints.txt with the SHA-256 of each file of this version in the index.

python -m benchmarks.release.lock            writes it by uv (pip install uv), which queries the index
python -m benchmarks.release.lock --check    compares it with constraints.txt, and with the files that pip would install
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from packaging.utils import canonicalize_name

from benchmarks.release.licences import PINNED, ROOT, pinned
from ground.files import write_text

LOCK = ROOT / "requirements.lock"
EXTRAS = ("cpu", "data", "hf", "genai", "rtx", "openvino", "interop", "sign", "mlflow", "ray", "dev", "docs")
HEAD = f"""# What `make locked` installs, by digest: constraints.txt for all platforms with Python 3.11 or newer.
# Written by `python -m benchmarks.release.lock` of the extras {", ".join(EXTRAS)}.
"""
_PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?==(?P<version>[^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def digests_from_text(text: str) -> dict[tuple[str, str], set[str]]:
    """Return digests by package and version."""
    found: dict[tuple[str, str], set[str]] = {}
    of_last: set[str] = set()
    for line in text.splitlines():
        if pin := _PIN.match(line):
            of_last = found.setdefault((canonicalize_name(pin["name"]), pin["version"]), set())
        of_last.update(_HASH.findall(line))
    return found


def unlike(locked: Mapping[tuple[str, str], Iterable[str]], pins: Mapping[str, str]) -> list[str]:
    """Return the differences between the lock and the constraints."""
    versions = dict(locked)
    wrong = [
        f"{name}=={version}: not in {LOCK.name}" for name, version in pins.items() if (name, version) not in locked
    ]
    wrong += [f"{name}=={version}: no digest" for (name, version), digests in versions.items() if not digests]
    other = [(name, version) for name, version in versions if pins.get(name, version) != version]
    return wrong + [f"{name}=={version}: {PINNED.name} has {pins[name]}" for name, version in other]


def foreign(report: Mapping[str, Any], locked: Mapping[tuple[str, str], set[str]]) -> list[str]:
    """Return files of pip's report (pip install --report) whose digest is not in the lock."""
    wrong = []
    for each in report["install"]:
        name, version = canonicalize_name(each["metadata"]["name"]), each["metadata"]["version"]
        digest = each["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest not in locked.get((name, version), ()):
            wrong.append(f"{name}=={version}: sha256 {digest}, in no line of {LOCK.name}")
    return wrong


def _compiled() -> str:
    uv = shutil.which("uv")
    if uv is None:
        raise click.ClickException("uv is not on PATH: pip install uv (in an environment of its own)")
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    command = [uv, "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-header", "--no-annotate"]
    command += ["--no-emit-index-url", "--no-emit-find-links", "--python-version", "3.11", "--constraint", PINNED.name]
    done = subprocess.run([*command, *extras, "pyproject.toml"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise click.ClickException(done.stderr.strip())
    return done.stdout


def _report() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        done = subprocess.run([*command, "--report", str(path), "--requirement", str(PINNED)], check=False)
        if done.returncode != 0:
            raise click.ClickException("pip could not tell what it would install")
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content


@click.command()
@click.option(
    "--check", is_flag=True, help="Compare the lock with the constraints, and with the files that pip would install."
)
def main(check: bool) -> None:
    """Write requirements.lock."""
    if not check:
        write_text(LOCK, f"{HEAD}{_compiled()}")
    locked = digests_from_text(LOCK.read_text(encoding="utf-8"))
    wrong = unlike(locked, pinned())
    if check:
        wrong += foreign(_report(), locked)
    if wrong:
        raise click.ClickException("\n".join(wrong))
    click.echo(f"{LOCK.name}: {len(locked)} packages, {sum(map(len, locked.values()))} digests")


if __name__ == "__main__":
    main()
