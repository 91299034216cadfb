"""A reproducible wheel: the same files give the same bytes on any machine at any time.

python -m benchmarks.release.wheel -o dist

A wheel also keeps the times of its sources, which SOURCE_DATE_EPOCH sets, and their modes, which are set here.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from ground.files import sha256_of_file

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("calib", "corp_deploy", "export", "ground", "perf", "pyproject.toml", "README.md", "LICENSE")
# The time without a commit: the first day in the format of wheels.
EARLIEST = 315_532_800


def tracked() -> list[str]:
    """Return the names of the files and links that git would commit."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted(name for name in names if name and os.path.lexists(ROOT / name))


def sources(into: Path) -> None:
    """Copy the sources of the wheel, with one mode."""
    for name in tracked():
        if Path(name).parts[0] in PARTS:
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, into / name)
            (into / name).chmod(0o644)


def committed() -> int:
    """Return the time of the newest commit, in seconds since 1970."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.stdout.strip().isdigit() else EARLIEST


def build(source: Path, into: Path, epoch: int) -> Path:
    """Build a wheel with the installed setuptools, without a network."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-index", "--no-deps"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run(
        [*pip, "--no-build-isolation", "--wheel-dir", str(into), str(source)],
        check=True,
        cwd=source,
        umask=0o022,
        env=environment | {"SOURCE_DATE_EPOCH": str(epoch)},
    )
    (wheel,) = into.glob("*.whl")
    return wheel


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default="dist", show_default=True)
def main(output: Path) -> None:
    """Build the wheel."""
    with tempfile.TemporaryDirectory() as scratch:
        sources(Path(scratch) / "source")
        wheel = build(Path(scratch) / "source", Path(scratch) / "wheel", committed())
        output.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(wheel, output / wheel.name)
        click.echo(f"{sha256_of_file(output / wheel.name)}  {os.path.relpath(output / wheel.name)}")


if __name__ == "__main__":
    main()
