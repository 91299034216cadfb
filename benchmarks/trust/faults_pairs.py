"""What happens where two processes work at once, or one of them dies."""

import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.trust.faults_happening import Happening, not_held
from benchmarks.trust.faults_scenarios import calibrate, package, reduce, run
from tests.faults import Ended, Fault, ended, tree


def _at_once(works: Sequence[Callable[[], Ended]]) -> list[Ended]:
    """How processes that run at once end."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for number, work in enumerate(works):
            child = os.fork()
            if child == 0:
                try:
                    (Path(folder) / str(number)).write_text(json.dumps(asdict(work())))
                finally:
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        return [Ended(**json.loads((Path(folder) / str(number)).read_text())) for number in range(len(works))]


def _codes(done: Sequence[Ended]) -> list[int]:
    return sorted(each.code for each in done)


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
        codes |= set(_codes(_at_once([partial(ended, words, place) for words in sizes])))
        whole = whole and tree(place) in alone
        load_checkpoint(place / "out")
    return Happening(
        made_by="two_reductions",
        what="two processes, one output", command="reduce", codes=sorted(codes), outcome="one of the two, whole",
        wrong=not_held(whole=whole, both_end_well=codes == {0}),
    )  # fmt: skip


def two_releases(home: Path) -> Happening:
    place = home / "place"
    words = ("release", home / "recipe.toml", "-o", place / "out", "--quiet")
    done = _at_once([partial(ended, words, place)] * 2)
    checked = ended(("check", place / "out", "--quiet"), place)
    return Happening(
        made_by="two_releases",
        what="two processes, one output", command="release", codes=_codes(done),
        outcome="the second is told that another one works there; `check` passes",
        wrong=not_held(one_refused=_codes(done) == [0, 2], checks=checked.code == 0,
                     told=any("works in this directory" in each.said for each in done)),
    )  # fmt: skip


def two_sweeps(home: Path) -> Happening:
    place = home / "swept"
    given = ("--model", home / "dense", "--moments", home / "moments.safetensors", "--images", home / "held-out.npz")
    words = ("sweep", *given, "--sparsity", "0.25,0.5", "--align", "mlp=8,head=8", "--quiet", "-o", place)
    done = _at_once([partial(ended, words, place)] * 2)
    again = ended(words, place)
    return Happening(
        made_by="two_sweeps",
        what="two processes, one output", command="sweep", codes=_codes(done),
        outcome="the second is told that another one works there",
        wrong=not_held(one_refused=_codes(done) == [0, 2], no_lock_stays=again.code == 0,
                     told=any("works in this directory" in each.said for each in done)),
    )  # fmt: skip


def two_packages(home: Path) -> Happening:
    """Two versions into one repository, over and over."""
    codes, kept = set[int](), True
    for number in range(6):
        place = home / f"packaged {number}"
        words = (*package(home), place / "repository", "--model-version")
        codes |= set(_codes(_at_once([partial(ended, (*words, version), place) for version in (1, 2)])))
        expected = json.loads((place / "repository" / "expected.json").read_text())
        kept = kept and '"1"' in json.dumps(expected) and '"2"' in json.dumps(expected)
        codes.add(ended(("package", "lint", place / "repository", "--quiet"), place).code)
    return Happening(
        made_by="two_packages",
        what="two processes, one output", command="package", codes=sorted(codes),
        outcome="one after the other: both versions are there; `package lint` passes",
        wrong=not_held(both_end_well=codes == {0}, both_versions_are_told=kept),
    )  # fmt: skip


def killed_with_a_lock(home: Path) -> Happening:
    """A release that holds its lock; then one that finds the file of it."""
    place = home / "killed"
    words = ("release", home / "recipe.toml", "-o", place / "out", "--quiet")
    fault = Fault(name="SIGKILL", nth=40, signal=signal.SIGKILL)
    done = [ended(words, place, fault), ended(words, place), ended(("check", place / "out", "--quiet"), place)]
    codes = [each.code for each in done]
    return Happening(
        made_by="killed_with_a_lock",
        what="a process that holds the lock is killed", command="release", codes=codes,
        outcome="the next one goes on; `check` passes",
        wrong=not_held(killed=codes[0] == -signal.SIGKILL, goes_on=codes[1:] == [0, 0]),
    )  # fmt: skip


def _as_rank(rank: int, port: int) -> None:
    """One of two processes of torchrun's; the second dies in its second batch."""
    from calib.collect import Collector

    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": 1}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in own.items()}}
    add, calls = Collector.add, []

    def dies(self: Collector, inputs: Any) -> None:
        calls.append(rank)
        if rank == 1 and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        add(self, inputs)

    Collector.add = dies  # type: ignore[method-assign]


def dead_rank(home: Path) -> Happening:
    place = home / "ranks"
    words = (*calibrate(home), "--batch-size", 2, "-o", place / "moments.safetensors")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = _at_once([partial(ended, words, place, first=partial(_as_rank, rank, port)) for rank in (0, 1)])
    left = [path.name for path in place.glob("*")] if place.is_dir() else []
    return Happening(
        made_by="dead_rank",
        what="a process of torchrun's is killed", command="calibrate", codes=[each.code for each in done],
        outcome="the other one tells that it has ended; nothing is written",
        wrong=not_held(killed=done[1].code == -signal.SIGKILL, ends=done[0].code == 4, nothing_left=not left,
                     told="another process of this run has ended" in " ".join(done[0].said.split())),
    )  # fmt: skip


EVERY = (two_reductions, two_releases, two_sweeps, two_packages, killed_with_a_lock, dead_rank)
