"""What happens to whole commands beyond their files: another process, another disk, too little memory, a dead worker, a
clock that leaps.
"""

import ctypes
import json
import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path

from benchmarks.trust.faults_happening import Happening, not_held
from benchmarks.trust.faults_scenarios import calibrate, released, run
from tests.faults import Fault, ended


def other_disk(home: Path) -> Happening:
    """A memory file system, when the temporary directory is on a disk."""
    there = Path("/dev/shm") / home.name
    shutil.rmtree(there, ignore_errors=True)
    try:
        release = ended(("release", home / "recipe.toml", "-o", there / "out", "--quiet"), there)
        package = ended(("package", there / "out", "-o", there / "new" / "r", "--quiet"), there)
        checked = ended(("check", there / "out", "--quiet"), there)
        codes = [release.code, package.code, checked.code]
        apart = there.stat().st_dev != home.stat().st_dev
    finally:
        shutil.rmtree(there, ignore_errors=True)
    return Happening(
        made_by="other_disk",
        what="output on another file system", command="release, package, check", codes=codes, outcome="as elsewhere",
        wrong=not_held(ends_well=set(codes) == {0}, another_file_system=apart),
    )  # fmt: skip


def _little_memory() -> None:
    """More than two images at once are too many, as on a GPU that others fill."""
    import torch

    from calib import collect
    from calib.inputs import Inputs, input_count

    add = collect.Collector.add

    def small(self: collect.Collector, inputs: Inputs) -> None:
        if input_count(inputs) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        add(self, inputs)

    collect.Collector.add = small  # type: ignore[method-assign]


def too_little_memory(home: Path) -> Happening:
    words, place = (*calibrate(home), "-o", home / "little" / "moments.safetensors"), home / "little"
    done = ended(words, place, first=_little_memory)
    run(*calibrate(home), "--batch-size", 2, "-o", home / "two.safetensors")
    same = (place / "moments.safetensors").read_bytes() == (home / "two.safetensors").read_bytes()
    return Happening(
        made_by="too_little_memory",
        what="memory runs out in a batch of 4", command="calibrate", codes=[done.code],
        outcome="begun anew with batches of 2, which is said; the bytes that --batch-size 2 gives",
        wrong=not_held(ends_well=done.code == 0, said="begun anew with --batch-size 2" in done.said, same_bytes=same),
    )  # fmt: skip


def _no_memory() -> None:
    from calib import collect
    from calib.inputs import Inputs

    def never(self: collect.Collector, inputs: Inputs) -> None:
        raise MemoryError("Unable to allocate 38.6 GiB")

    collect.Collector.add = never  # type: ignore[method-assign]


def no_memory(home: Path) -> Happening:
    place = home / "none"
    done = ended((*calibrate(home), "-o", place / "moments.safetensors"), place, first=_no_memory)
    left = [path.name for path in place.glob("*")] if place.is_dir() else []
    return Happening(
        made_by="no_memory",
        what="memory runs out for one image", command="calibrate", codes=[done.code], outcome="nothing is written",
        wrong=not_held(told=done.code == 4 and "too little memory" in done.said, nothing_left=not left),
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
    done = ended(words, place, first=_mortal_workers)
    left = [path.name for path in place.glob("*")] if place.is_dir() else []
    again = ended(words, place)
    same = (place / "moments.safetensors").read_bytes() == (home / "moments.safetensors").read_bytes()
    return Happening(
        made_by="dead_worker",
        what="a process that decodes images is killed", command="calibrate", codes=[done.code, again.code],
        outcome="told, nothing is written; a second run gives the same bytes",
        wrong=not_held(told=done.code == 4 and "decodes images died" in done.said, nothing_left=not left,
                     again=again.code == 0, same_bytes=same),
    )  # fmt: skip


def _leap(told: Path) -> None:
    """From now on; how far it leaps is written down."""
    ctypes.CDLL(None).fault_clock(ctypes.c_long(3600))
    told.write_text(str(abs(time.time() - time.time())))


def leaping_clock(home: Path) -> Happening:
    """By an hour, back and forth, at each look at the time of day."""
    place = home / "leaps"
    release = released(home)
    subjects = (release / "dense" / "model.onnx", release / "reduced" / "model.onnx")
    words = ("bench", *subjects, "--batch", 2, "--time-limit", 2, "--quiet", "-o", place / "bench.json")
    leaps = place.with_name("leaps of the clock")
    done = ended(words, place, first=partial(_leap, leaps))
    blocks = [block for row in json.loads((place / "bench.json").read_text())["rows"] for block in row["blocks"]]
    times = [value for block in blocks for value in block["compute_ms"]]
    return Happening(
        made_by="leaping_clock",
        what="the clock leaps an hour, back and forth, while it times", command="bench", codes=[done.code],
        outcome="no time is negative or above a minute: a steady clock is read",
        wrong=not_held(leaps=float(leaps.read_text()) > 3000.0, ends_well=done.code == 0,
                       times=bool(times) and all(0 < each < 60_000 for each in times)),
    )  # fmt: skip


def disturbed_demo(home: Path) -> Happening:
    """By one signal after the other, into one directory."""
    place = home / "demo"
    words = ("demo", "-o", place / "out", "--quiet")
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    faults = [Fault(name="at any time", signal=each, share=1.0) for each in signals]
    done = [ended(words, place, fault, takes_s=3.0 * number) for number, fault in enumerate(faults, 1)]
    whole = ended(words, place)
    codes = [each.code for each in (*done, whole)]
    return Happening(
        made_by="disturbed_demo",
        what="SIGINT after 3 s, SIGTERM after 6, SIGKILL after 9", command="demo", codes=codes,
        outcome="the same command then ends well",
        wrong=not_held(codes=codes == [130, 143, -9, 0], no_traceback=not any("Traceback" in e.said for e in done)),
    )  # fmt: skip


EVERY = (other_disk, too_little_memory, no_memory, dead_worker, leaping_clock, disturbed_demo)
