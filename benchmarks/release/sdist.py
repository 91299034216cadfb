"""The wheel, and the source distribution from which the wheel can be built again.

python -m benchmarks.release.sdist -o dist       builds both, and the wheel once more from the source distribution

The source distribution has all files of the commit, including tests, records and pages, and the wheel's metadata as
PKG-INFO. It is written here because setuptools keeps the times and the owner of files. The wheel built from it has to
be equal, byte for byte, to the wheel built from the tree.
"""

import gzip
import io
import os
import shutil
import tarfile
import tempfile
import zipfile
from pathlib import Path

import click

from benchmarks.release.wheel import ROOT, build, committed, sources, tracked
from ground.files import replacing, sha256_of_file


def metadata(wheel: Path) -> bytes:
    """Return the core metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name)


def _anonymous(info: tarfile.TarInfo, epoch: int) -> tarfile.TarInfo:
    """Remove the owner, and set the commit's time and one of two modes."""
    info.uid, info.gid, info.uname, info.gname, info.mtime = 0, 0, "", "", epoch
    info.mode = 0o755 if info.mode & 0o100 else 0o644
    return info


def write_sdist(wheel: Path, into: Path, epoch: int) -> Path:
    """Write the source distribution of a wheel's version."""
    stem = "-".join(wheel.name.split("-")[:2])
    with (
        replacing(into / f"{stem}.tar.gz") as temporary,
        temporary.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        information = metadata(wheel)
        first = tarfile.TarInfo(f"{stem}/PKG-INFO")
        first.size = len(information)
        archive.addfile(_anonymous(first, epoch), io.BytesIO(information))
        for name in tracked():
            archive.add(ROOT / name, f"{stem}/{name}", recursive=False, filter=lambda info: _anonymous(info, epoch))
    return into / f"{stem}.tar.gz"


def unpacked(sdist: Path, into: Path) -> Path:
    """Unpack a source distribution, and return its directory."""
    shutil.unpack_archive(sdist, into, filter="data")
    (root,) = into.iterdir()
    return root


def both(scratch: Path, epoch: int) -> tuple[Path, Path]:
    """Build the wheel and the source distribution. Raises ClickException if the latter gives another wheel."""
    sources(scratch / "tree")
    wheel = build(scratch / "tree", scratch / "of-tree", epoch)
    sdist = write_sdist(wheel, scratch, epoch)
    again = build(unpacked(sdist, scratch / "unpacked"), scratch / "of-sdist", epoch)
    if sha256_of_file(again) != sha256_of_file(wheel):
        raise click.ClickException(f"{wheel.name}: built from {sdist.name} it has other bytes than from the tree")
    return wheel, sdist


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default="dist", show_default=True)
def main(output: Path) -> None:
    """Build the wheel and the source distribution."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for path in both(Path(scratch), committed()):
            shutil.copyfile(path, output / path.name)
            click.echo(f"{sha256_of_file(output / path.name)}  {os.path.relpath(output / path.name)}")


if __name__ == "__main__":
    main()
