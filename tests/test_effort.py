"""Seconds and peaks of steps by a fake clock and fake peaks, and by memory really taken; what commands tell."""

import json
import mmap
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from corp_deploy.cli import main
from corp_deploy.store.checkpoint import save
from ground.effort import Effort, Stopwatch
from perf.runners.memory import resident_gauge
from tests import tiny

MIB = 2**20


class FakePeak:
    """Hands out these values, one a turn."""

    def __init__(self, *values: int) -> None:
        self._values: Iterator[int] = iter(values)
        self.resets = 0

    def reset_peak(self) -> None:
        self.resets += 1

    def peak(self) -> int:
        return next(self._values)


def clock(*times: float) -> Callable[[], float]:
    given = iter(times)
    return lambda: next(given)


def test_turns_of_a_part_add_up_and_keep_the_highest_peak() -> None:
    host, device = FakePeak(10, 50, 30), FakePeak(3, 7, 9)
    watch = Stopwatch(host=host, device=device, clock=clock(0.0, 2.0, 10.0, 11.0, 20.0, 20.5))
    for name in ("select", "recover", "select"):
        with watch.of(name):
            pass
    assert watch.efforts == {
        "select": Effort(seconds=2.5, peak_bytes=30, device_peak_bytes=9),
        "recover": Effort(seconds=1.0, peak_bytes=50, device_peak_bytes=7),
    }
    assert (host.resets, device.resets) == (3, 3)
    assert list(watch.efforts) == ["select", "recover"]


def test_a_turn_that_fails_is_not_counted() -> None:
    watch = Stopwatch(host=FakePeak(0), clock=clock(0.0))
    with pytest.raises(KeyError), watch.of("export"):
        raise KeyError
    assert watch.efforts == {}


@pytest.mark.parametrize(
    ("effort", "words"),
    [
        (Effort(seconds=2.04, peak_bytes=3 * MIB, device_peak_bytes=None), "2.0 s, peak memory 3 MiB"),
        (Effort(seconds=1.0, peak_bytes=None, device_peak_bytes=MIB), "1.0 s, on the GPU 1 MiB"),
    ],
)
def test_words_leave_out_what_is_not_known(effort: Effort, words: str) -> None:
    assert effort.words == words


def test_the_peak_of_one_step_is_not_that_of_an_earlier_one() -> None:
    gauge = resident_gauge()
    if gauge is None:
        pytest.skip("the system does not let this process reset its peak")
    watch = Stopwatch(host=gauge)
    # Pages of its own: an allocator may have some at hand.
    with watch.of("large"), mmap.mmap(-1, 96 * MIB) as fresh:
        fresh.write(b"1" * len(fresh))
    with watch.of("small"):
        pass
    large, small = (watch.efforts[name].peak_bytes for name in ("large", "small"))
    assert large is not None
    assert small is not None
    assert large - small > 80 * MIB


def test_commands_tell_what_they_took_and_write_the_same_bytes(tmp_path: Path) -> None:
    save(tiny.checkpoint(), tmp_path / "dense")
    np.save(tmp_path / "images.npy", tiny.images(12))
    moments = tmp_path / "m.safetensors"
    dense = ("--model", tmp_path / "dense")
    of_calibrate = ("calibrate", *dense, "--images", tmp_path / "images.npy", "-o", moments)
    of_reduce = ("reduce", *dense, "--moments", moments, "--mlp", 0.5, "--align", "mlp=8", "-o", tmp_path / "reduced")
    of_export = ("export", "--model", tmp_path / "reduced", "-o", tmp_path / "model.onnx")
    contents = []
    for _ in range(2):
        for words in (of_calibrate, of_reduce, of_export):
            took = told(*words)["effort"]
            assert list(took) == {"reduce": ["plan", "select", "recover"]}.get(str(words[0]), [words[0]])
            assert all(each["seconds"] > 0.0 and each["device_peak_bytes"] is None for each in took.values())
        files = sorted(each for each in tmp_path.rglob("*") if each.is_file())
        contents.append({str(each): each.read_bytes() for each in files})
        shutil.rmtree(tmp_path / "reduced")
    assert contents[0] == contents[1]


def told(*words: object) -> dict[str, Any]:
    result = CliRunner().invoke(main, [str(word) for word in (*words, "--json")])
    assert result.exit_code == 0, result.output + result.stderr
    record: dict[str, Any] = json.loads(result.stdout)
    return record
