"""What happens to whole commands beyond their files: another process, another disk, too little memory, a dead worker, a
clock that leaps.
"""

import ctypes
import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults import calibrate, prepare, reduce, run
from tests.faults import Ended, Fault, ended, tree

NOTHING = Fault(name="nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """What happened to a command, its exit codes, what is left, and what of that is not as it should be."""

    what: str
    command: str
    codes: Sequence[int]
    outcome: str
    wrong: Sequence[str]


def _wrong(**held: bool) -> list[str]:
    return [name.replace("_", " ") for name, holds in held.items() if not holds]


def _both(works: Sequence[Callable[[], Ended]]) -> list[int]:
    """The exit codes of processes that run at once."""
    children = []
    for work in works:
        child = os.fork()
        if child == 0:
            os._exit(work().code % 256)
        children.append(child)
    return [os.WEXITSTATUS(os.waitpid(child, 0)[1]) for child in children]


def two_reductions(home: Path) -> Happening:
    """Of two sizes into one directory, over and over."""
    from corp_deploy.store.checkpoint import load_checkpoint

    place, alone = home / "place", []
    sizes = [(*reduce(home), "--mlp", size, "-o", place / "out") for size in (0.25, 0.5)]
    for words in sizes:
        run(*words)
        alone.append(tree(place))
        shutil.rmtree(place)
    codes, whole = set[int](), True
    for _ in range(12):
        codes |= set(_both([lambda words=words: ended(words, place, NOTHING) for words in sizes]))  # type: ignore[misc]
        whole = whole and tree(place) in alone
        load_checkpoint(place / "out")
    return Happening(
        what="two processes, one output", command="reduce", codes=sorted(codes), outcome="one of the two, whole",
        wrong=_wrong(whole=whole, both_end_well=codes == {0}),
    )  # fmt: skip


def two_releases(home: Path) -> Happening:
    place = home / "place"
    words = ("release", home / "recipe.toml", "-o", place / "out", "--quiet")
    codes = _both([lambda: ended(words, place, NOTHING)] * 2)
    checked = ended(("check", place / "out", "--quiet"), place, NOTHING)
    return Happening(
        what="two processes, one output", command="release", codes=sorted(codes),
        outcome="the second is told that another one works there; `check` passes",
        wrong=_wrong(one_refused=sorted(codes) == [0, 2], checks=checked.code == 0),
    )  # fmt: skip


def other_disk(home: Path) -> Happening:
    """A memory file system, when the temporary directory is on a disk."""
    there = Path("/dev/shm") / home.name
    shutil.rmtree(there, ignore_errors=True)
    try:
        release = ended(("release", home / "recipe.toml", "-o", there / "out", "--quiet"), there, NOTHING)
        package = ended(("package", there / "out", "-o", there / "new" / "r", "--quiet"), there, NOTHING)
        checked = ended(("check", there / "out", "--quiet"), there, NOTHING)
        codes = [release.code, package.code, checked.code]
        apart = there.stat().st_dev != home.stat().st_dev
    finally:
        shutil.rmtree(there, ignore_errors=True)
    return Happening(
        what="output on another file system", command="release, package, check", codes=codes, outcome="as elsewhere",
        wrong=_wrong(ends_well=set(codes) == {0}, another_file_system=apart),
    )  # fmt: skip


def _little_memory() -> None:
    """More than two images at once are too many, as on a GPU that others fill."""
    import torch

    from calib import collect
    from calib.inputs import Inputs, batch_size

    add = collect.Collector.add

    def small(self: collect.Collector, inputs: Inputs) -> None:
        if batch_size(inputs) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        add(self, inputs)

    collect.Collector.add = small  # type: ignore[method-assign]


def too_little_memory(home: Path) -> Happening:
    words, place = (*calibrate(home), "-o", home / "little" / "moments.safetensors"), home / "little"
    done = ended(words, place, NOTHING, _little_memory)
    run(*calibrate(home), "--batch-size", 2, "-o", home / "two.safetensors")
    same = (place / "moments.safetensors").read_bytes() == (home / "two.safetensors").read_bytes()
    return Happening(
        what="memory runs out in a batch of 4", command="calibrate", codes=[done.code],
        outcome="begun anew with batches of 2, which is said; the bytes that --batch-size 2 gives",
        wrong=_wrong(ends_well=done.code == 0, said="begun anew with --batch-size 2" in done.said, same_bytes=same),
    )  # fmt: skip


def _no_memory() -> None:
    from calib import collect
    from calib.inputs import Inputs

    def never(self: collect.Collector, inputs: Inputs) -> None:
        raise MemoryError("Unable to allocate 38.6 GiB")

    collect.Collector.add = never  # type: ignore[method-assign]


def no_memory(home: Path) -> Happening:
    place = home / "none"
    done = ended((*calibrate(home), "-o", place / "moments.safetensors"), place, NOTHING, _no_memory)
    left = [path.name for path in place.glob("*")] if place.is_dir() else []
    return Happening(
        what="memory runs out for one image", command="calibrate", codes=[done.code], outcome="nothing is written",
        wrong=_wrong(told=done.code == 4 and "too little memory" in done.said, nothing_left=not left),
    )  # fmt: skip


def _mortal_workers() -> None:
    import torch.utils.data

    from calib import images

    read = images._Rows.__getitem__

    def dies(self: images._Rows, position: int) -> object:
        if torch.utils.data.get_worker_info() is not None and position == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(self, position)

    images._Rows.__getitem__ = dies  # type: ignore[assignment,method-assign]


def dead_worker(home: Path) -> Happening:
    words, place = (*calibrate(home), "--workers", 1, "-o", home / "dead" / "moments.safetensors"), home / "dead"
    done = ended(words, place, NOTHING, _mortal_workers)
    left = [path.name for path in place.glob("*")] if place.is_dir() else []
    again = ended(words, place, NOTHING)
    same = (place / "moments.safetensors").read_bytes() == (home / "moments.safetensors").read_bytes()
    return Happening(
        what="a process that decodes images is killed", command="calibrate", codes=[done.code, again.code],
        outcome="told, nothing is written; a second run gives the same bytes",
        wrong=_wrong(told=done.code == 4 and "decodes images died" in done.said, nothing_left=not left,
                     again=again.code == 0, same_bytes=same),
    )  # fmt: skip


def leaping_clock(home: Path) -> Happening:
    """By an hour, back and forth, at each look at the time of day."""
    place = home / "leaps"
    release = home / "place" / "out"
    subjects = (release / "dense" / "model.onnx", release / "reduced" / "model.onnx")
    words = ("bench", *subjects, "--batch", 2, "--time-limit", 0.5, "--quiet", "-o", place / "bench.json")
    done = ended(words, place, NOTHING, lambda: ctypes.CDLL(None).fault_clock(ctypes.c_long(3600)))
    blocks = [block for row in json.loads((place / "bench.json").read_text())["rows"] for block in row["blocks"]]
    times = [value for block in blocks for value in block["compute_ms"]]
    return Happening(
        what="the clock leaps an hour, back and forth, while it times", command="bench", codes=[done.code],
        outcome="no time is negative or above a minute: a steady clock is read",
        wrong=_wrong(ends_well=done.code == 0, times=bool(times) and all(0 < each < 60_000 for each in times)),
    )  # fmt: skip


def happenings(home: Path) -> list[Happening]:
    """Each once; the later ones use what the releases left."""
    prepare(home)
    (home / "place").mkdir()
    every = (two_reductions, two_releases, other_disk, too_little_memory, no_memory, dead_worker, leaping_clock)
    return [each(home) for each in every]
