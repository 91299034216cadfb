"""Seconds and peaks of steps by a fake clock and fake peaks, and by memory really taken; what commands tell."""

import json
import mmap
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from corp_deploy.algebra import scores
from corp_deploy.reduction import choice as choice
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from ground.effort import Effort, Stopwatch
from perf.runners.protocol import resident_gauge
from perf.timing.watch import cpu_name
from tests import tiny
from tests.command import invoked

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


def test_repeated_timings_add_up_and_keep_the_highest_peak() -> None:
    host, device = FakePeak(10, 50, 30), FakePeak(3, 7, 9)
    watch = Stopwatch(host=host, device=device, clock=clock(0.0, 2.0, 10.0, 11.0, 20.0, 20.5))
    for name in ("select", "recover", "select"):
        with watch.measure(name):
            pass
    assert watch.efforts == {
        "select": Effort(seconds=2.5, peak_bytes=30, device_peak_bytes=9),
        "recover": Effort(seconds=1.0, peak_bytes=50, device_peak_bytes=7),
    }
    assert (host.resets, device.resets, list(watch.efforts)) == (6, 6, ["select", "recover"])


def test_nested_timing_is_not_counted_twice() -> None:
    host = FakePeak(10, 50, 20, 40, 30)
    watch = Stopwatch(host=host, clock=clock(0.0, 1.0, 5.0, 5.5, 7.5, 8.0))
    with watch.measure("whole"):
        with watch.measure("select"):
            pass
        with watch.measure("recover"):
            pass
    assert watch.efforts == {
        "select": Effort(seconds=4.0, peak_bytes=50, device_peak_bytes=None),
        "recover": Effort(seconds=2.0, peak_bytes=40, device_peak_bytes=None),
        "whole": Effort(seconds=1.0 + 0.5 + 0.5, peak_bytes=30, device_peak_bytes=None),
    }


def test_failed_part_counts_for_its_outer_part() -> None:
    watch = Stopwatch(host=FakePeak(1, 2, 3), clock=clock(0.0, 1.0, 6.0))
    with watch.measure("whole"), suppress(KeyError), watch.measure("select"):
        raise KeyError
    assert watch.efforts == {"whole": Effort(seconds=6.0, peak_bytes=2, device_peak_bytes=None)}
    watch = Stopwatch(host=FakePeak(0), clock=clock(0.0))
    with pytest.raises(KeyError), watch.measure("export"):
        raise KeyError
    assert watch.efforts == {}


@pytest.mark.parametrize(
    ("effort", "words"),
    [
        (Effort(seconds=2.04, peak_bytes=3 * MIB, device_peak_bytes=None), "2.0 s, peak memory 3 MiB"),
        (Effort(seconds=1.0, peak_bytes=None, device_peak_bytes=MIB), "1.0 s, on the GPU 1 MiB"),
    ],
)
def test_text_omits_unknown_figures(effort: Effort, words: str) -> None:
    assert effort.describe == words


def test_peak_memory_is_per_step() -> None:
    gauge = resident_gauge()
    if gauge is None:
        pytest.skip("the system does not let this process reset its peak")
    watch = Stopwatch(host=gauge)
    # Pages of its own: an allocator may have some at hand.
    with watch.measure("large"), mmap.mmap(-1, 96 * MIB) as fresh:
        fresh.write(b"1" * len(fresh))
    with watch.measure("small"):
        pass
    large, small = (watch.efforts[name].peak_bytes for name in ("large", "small"))
    assert large is not None
    assert small is not None
    assert large - small > 80 * MIB


@pytest.mark.slow("graph")
def test_commands_report_their_effort_and_write_equal_bytes(tmp_path: Path) -> None:
    tiny.written(tmp_path, 12)
    moments = tmp_path / "m.safetensors"
    dense = ("--model", tmp_path / "dense")
    of_calibrate = ("calibrate", *dense, "--images", tmp_path / "images.npy", "-o", moments)
    of_reduce = ("reduce", *dense, "--moments", moments, "--mlp", 0.5, "--align", "mlp=8", "-o", tmp_path / "reduced")
    of_export = ("export", "--model", tmp_path / "reduced", "-o", tmp_path / "model.onnx")
    beside = {
        of_calibrate: tmp_path / "m.safetensors.effort.json",
        of_reduce: tmp_path / "reduced/effort.json",
        of_export: tmp_path / "model.onnx.effort.json",
    }
    contents = []
    for _ in range(2):
        for words, path in beside.items():
            took = told(*words)["effort"]
            parts = {"reduce": ["select", "recover"]}.get(str(words[0]), [words[0]])
            assert list(took) == [*parts, "read and write"]
            assert all(each["seconds"] > 0.0 and each["device_peak_bytes"] is None for each in took.values())
            kept = json.loads(path.read_text())
            assert kept["parts"] == took
            assert kept["machine"] == cpu_name()
            assert kept["versions"]["torch"] == version("torch")
        files = sorted(each for each in tmp_path.rglob("*") if each.is_file() and each not in beside.values())
        contents.append({str(each): each.read_bytes() for each in files})
        shutil.rmtree(tmp_path / "reduced")
    assert contents[0] == contents[1]


def told(*words: object) -> dict[str, Any]:
    result = invoked(*words, "--json")
    record: dict[str, Any] = json.loads(result.stdout)
    return record


@pytest.mark.parametrize(
    ("preset", "asked"),
    [
        ("best", {"mlp_sparsity": 0.5, "attention_sparsity": 0.5}),
        ("corp-v1", {"mlp_sparsity": 0.5, "attention_sparsity": 0.5}),
        ("grail", {"mlp_sparsity": 0.5, "heads_sparsity": 0.5}),
    ],
)
def test_ranking_counts_as_selection_time(
    tmp_path: Path, preset: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that only what ranks channels moves on."""
    ranked: list[str] = []

    def counted(room: Any, name: str) -> None:
        work = getattr(room, name)

        def moved_on(*given: Any, **more: Any) -> Any:
            ranked.append(name)
            return work(*given, **more)

        monkeypatch.setattr(room, name, moved_on)

    for room, name in ((choice, "eliminate_blocks"), (choice, "swap"), (scores, "energy"), (scores, "wanda")):
        counted(room, name)
    checkpoint = tiny.checkpoint()
    moments = calibrate(checkpoint, tiny.opened(tmp_path / "i.npy", tiny.images(8), checkpoint.model), batch_size=8)
    watch = Stopwatch(host=None, clock=lambda: float(len(ranked)))
    method = method_from_preset(preset, align_hidden=8, align_head=8, **asked)
    with watch.measure("recover"):
        timed = reduce(checkpoint.model, moments, method, watch=watch)
    assert watch.efforts["select"].seconds == len(ranked) > 0
    assert watch.efforts["recover"].seconds == 0.0
    expected = {"best": {"eliminate_blocks", "swap"}, "corp-v1": {"energy"}, "grail": {"wanda"}}
    assert expected[preset] <= set(ranked)
    plain = reduce(checkpoint.model, moments, method).model.state_dict()
    assert all(value.equal(plain[name]) for name, value in timed.model.state_dict().items())
