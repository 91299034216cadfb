"""The slope of memory in long runs, on lines that are known."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.speed.long_runs import own_mib, slope, told, write_images


@pytest.mark.parametrize("rate", [0.0, 3.0])
def test_the_slope_of_a_line_with_a_beginning_and_a_spike(rate: float) -> None:
    done = np.arange(100, 10_001, 100.0)
    mib = 300.0 + rate * done / 1000
    mib[:20] = np.linspace(0, 300, 20)  # what is loaded first is no growth
    mib[50] += 400.0
    noise = np.random.default_rng(0).normal(0, 0.1, len(mib))
    found = slope(list(zip(done, mib + noise, strict=True)))
    assert found["mib_per_1000"] == pytest.approx(rate, abs=0.02)
    assert found["low"] <= rate <= found["high"]
    assert found["high"] - found["low"] < 0.1


def test_what_is_told() -> None:
    told_of = told([(float(n), 100.0 + (n == 7)) for n in range(1, 11)], "ten", 2.0)
    assert (told_of["count"], told_of["peak_mib"], told_of["least_mib"]) == (10, 101.0, 100.0)
    assert told_of["slope"]["mib_per_1000"] == 0.0


def test_a_process_and_its_children() -> None:
    before = own_mib(os.getpid())
    script = "x = bytearray(80 << 20); x[::4096] = b'x' * len(x[::4096]); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 80 < own_mib(child.pid) < 120
        assert own_mib(os.getpid()) > before + 70
        child.kill()
    assert own_mib(child.pid) == 0.0


def test_images_are_written_in_pieces(tmp_path: Path) -> None:
    write_images(tmp_path / "i.npy", 3)
    images = np.load(tmp_path / "i.npy", mmap_mode="r")
    assert (images.shape, images.dtype) == ((3, 3, 224, 224), np.float32)
    assert abs(float(images.std()) - 1) < 0.01
