"""Calibration over several processes, after interruptions and within memory limits gives the same moments."""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from calib import memory
from calib.calibrate import STATE, ResumeFile, calibrate_sites
from calib.collect import Collector, Options
from calib.combination import merge_moments
from calib.distributed import Ranks, join_ranks
from calib.images import open_images
from calib.inputs import Inputs
from calib.memory import Shape
from calib.moments import ChannelMoments, HeadMoments, Moments
from calib.store import load_moments, save_moments
from ground.errors import BadInput, RankLost
from tests.ranks import exits_of
from tests.refusals import rejects
from tests.sums import assert_equal, sums_of
from tests.test_calib_collect import DIM, HEADS, HIDDEN, sites_of, tiny

SHAPE = (3, 2, 10)
COUNT = 23
SYSTEM = Options(attention_system=True)


def brightness(images: Inputs) -> Tensor:
    """Return fractional weights of the five tokens."""
    assert isinstance(images, Tensor)
    return nn.functional.avg_pool2d(images, 2).mean(1).flatten(1).abs()


WEIGHTED = replace(SYSTEM, token_weights=brightness)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    images = np.random.default_rng(0).normal(size=(COUNT, *SHAPE)).astype(np.float32)
    np.save(tmp_path / "images.npy", images)
    return tmp_path / "images.npy"


def calibrated(
    path: Path,
    *,
    batch_size: int = 4,
    max_bad: int = 0,
    options: Options = SYSTEM,
    checkpoint: ResumeFile | None = None,
    ranks: Ranks | None = None,
    progress: Callable[[int], None] | None = None,
) -> Moments:
    model = tiny()
    return calibrate_sites(
        Collector(model, sites_of(model), device="cpu", options=options),
        open_images(path, image_shape=SHAPE, transform=lambda _: pytest.fail("no picture"), max_bad=max_bad),
        batch_size=batch_size, lineage={"model": "m", "preprocessing": "p"},
        checkpoint=checkpoint, ranks=ranks or Ranks(), progress=progress,
    )  # fmt: skip


class Interrupted(Exception):
    """An interruption as by Ctrl-C or a lost machine."""


def interrupted(path: Path, folder: Path, *, every: int, at: int, **options: Any) -> ResumeFile:
    """Interrupt a calibration after `at` images and return its checkpoint file."""

    def progress(done: int) -> None:
        if done >= at:
            raise Interrupted

    checkpoint = ResumeFile(path=folder / "state.safetensors", every=every)
    with pytest.raises(Interrupted):
        calibrated(path, checkpoint=checkpoint, progress=progress, **options)
    return checkpoint


@pytest.mark.parametrize("stop", [4, 20])
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(path: Path, tmp_path: Path, stop: int) -> None:
    checkpoint = interrupted(path, tmp_path, every=8, at=stop)
    heard: list[int] = []
    resumed = calibrated(path, checkpoint=checkpoint, progress=heard.append)
    assert heard[0] == stop // 8 * 8 + 4
    assert_equal(resumed, calibrated(path), limit=0.0)
    checkpoint.clear()
    assert [entry.name for entry in tmp_path.iterdir()] == ["images.npy"]


def test_resumed_run_keeps_its_kernel(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calib.collect.kernel_for", lambda width: "onednn")
    uninterrupted = calibrated(path)
    checkpoint = interrupted(path, tmp_path, every=8, at=12)
    monkeypatch.setattr("calib.collect.kernel_for", lambda width: "blas")
    assert_equal(calibrated(path, checkpoint=checkpoint), uninterrupted, limit=0.0)


def test_finished_checkpoint_is_not_counted_twice(path: Path, tmp_path: Path) -> None:
    checkpoint = ResumeFile(path=tmp_path / "state.safetensors", every=1)
    calibrated(path, checkpoint=checkpoint)
    assert_equal(calibrated(path, checkpoint=checkpoint), calibrated(path), limit=0.0)


def test_resuming_remembers_bad_images_and_kept_dims(path: Path, tmp_path: Path) -> None:
    images = np.load(path)
    images[[1, 9, 17]] = np.nan
    np.save(path, images)
    options = Options(kept={"attn": torch.tensor([[0, 3], [1, 7]])})
    checkpoint = interrupted(path, tmp_path, every=5, at=12, max_bad=3, options=options)
    resumed = calibrated(path, max_bad=3, options=options, checkpoint=checkpoint)
    assert_equal(resumed, calibrated(path, max_bad=3, options=options), limit=0.0)
    assert resumed.images == COUNT - 3
    rejects("at most 2 bad images", calibrated, path, max_bad=2, options=options)


def test_checkpoints_of_another_run_are_refused(path: Path, tmp_path: Path) -> None:
    checkpoint = interrupted(path, tmp_path, every=4, at=8)
    with pytest.raises(BadInput, match="checkpoint of another run: batch_size was '4', now '5'"):
        calibrated(path, batch_size=5, checkpoint=checkpoint)
    rejects("options was", calibrated, path, options=Options(), checkpoint=checkpoint)
    np.save(path, np.load(path)[::-1].copy())
    rejects("data was", calibrated, path, checkpoint=checkpoint)
    checkpoint.path.write_bytes(checkpoint.path.read_bytes()[:-5])
    rejects("truncated or foreign", calibrated, path, checkpoint=checkpoint)


def test_moments_file_is_not_accepted_as_a_checkpoint(path: Path, tmp_path: Path) -> None:
    checkpoint = ResumeFile(path=tmp_path / "moments.safetensors", every=4)
    save_moments(calibrated(path), checkpoint.path)
    rejects("holds moments, not a calibration's checkpoint", calibrated, path, checkpoint=checkpoint)


@pytest.mark.parametrize(
    "state", ["", "[]", "{", '{"position": 8, "bad": [], "run": {}, "kernel": "abacus"}', "[" * 10**5]
)
def test_malformed_state_is_refused(path: Path, tmp_path: Path, state: str) -> None:
    checkpoint = ResumeFile(path=tmp_path / "state.safetensors", every=4)
    save_moments(replace(calibrated(path), lineage={STATE: state}), checkpoint.path)
    rejects("not a calibration's checkpoint: ", calibrated, path, checkpoint=checkpoint)


def test_different_forward_precisions_do_not_merge(path: Path) -> None:
    rough = calibrated(path, options=replace(SYSTEM, precision="bfloat16"))
    rejects("dtype differs, got 'float32' and 'bfloat16'", merge_moments, calibrated(path), rough)


def test_sums_beyond_memory_are_refused_before_the_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calib.calibrate.bytes_available", lambda device: 360_000)
    heard: list[int] = []
    with pytest.raises(BadInput, match=r"2 sites need 0\.00 GB.*largest is mlp.*collect it for kept dims only"):
        calibrated(path, progress=heard.append)
    assert not heard
    calibrated(path, options=Options())


def test_predicted_memory_equals_the_size_of_the_moments(path: Path) -> None:
    model = tiny()
    shapes = memory.shapes_of_sites(model, sites_of(model), example=torch.zeros(1, *SHAPE), device="cpu")
    assert shapes == {
        "attn": Shape(moments=HeadMoments, tokens=5, sizes={"H": HEADS, "D": DIM, "X": DIM, "C": HEADS * DIM}),
        "mlp": Shape(moments=ChannelMoments, tokens=5, sizes={"F": HIDDEN}),
    }
    for options in (Options(), SYSTEM, Options(kept={"attn": torch.tensor([[0, 3, 4], [1, 2, 7]])})):
        kept = {name: kept_HK.shape[1] for name, kept_HK in (options.kept or {}).items()}
        needed = memory.bytes_needed(shapes, attention_system=options.attention_system, kept=kept)
        moments = calibrated(path, options=options)
        for name, site in moments.sites.items():
            assert sum(each.nbytes for each in sums_of(site).values()) == needed[name]


def test_head_of_64_dims_takes_the_papers_system_size() -> None:
    shape = Shape(moments=HeadMoments, tokens=197, sizes={"H": 1, "D": 64})
    assert shape.bytes_of_system() == 8 * 2080**2
    assert shape.bytes_of_system(kept=32) == 8 * (528**2 + 32**2 + 1)
    assert memory.bytes_available("cpu") > 0


def test_shares_cover_every_image_once() -> None:
    for size in (1, 2, 3, 7):
        spans = [Ranks(rank=rank, size=size).share(COUNT) for rank in range(size)]
        assert [position for span in spans for position in span] == list(range(COUNT))
        assert max(map(len, spans)) - min(map(len, spans)) <= 1


@pytest.mark.slow("process")
@pytest.mark.parametrize(("size", "fate", "options"), [(2, "", SYSTEM), (3, "weighted", WEIGHTED)])
def test_several_processes_equal_one_process(
    path: Path, tmp_path: Path, size: int, fate: str, options: Options
) -> None:
    output = tmp_path / "moments.safetensors"
    exits = exits_of(__name__, size, path, output, fate)
    assert [code for code, _ in exits] == [0] * size, exits
    assert_equal(load_moments(output), calibrated(path, options=options), shared=2e-7)


@pytest.mark.slow("process")
def test_killed_process_leaves_an_error_and_no_file(path: Path, tmp_path: Path) -> None:
    output = tmp_path / "moments.safetensors"
    (alive, message), (killed, _) = exits_of(__name__, 2, path, output, "killed")
    assert killed == -signal.SIGKILL
    assert alive == 3
    assert "rank 0 of 2: another process of this run has ended or can't be reached" in message
    assert not output.exists()


@pytest.mark.slow("process")
def test_bad_input_in_one_process_ends_all_processes(path: Path, tmp_path: Path) -> None:
    images = np.load(path)
    images[-1] = np.nan
    np.save(path, images)
    output = tmp_path / "moments.safetensors"
    for code, message in exits_of(__name__, 2, path, output, ""):
        assert code == 2
        assert f"rank 1 of 2: {path}[22]: holds NaN or Inf" in message
    assert not output.exists()


def one_of_several(path: str, output: str, fate: str) -> int:
    """Calibrate in one process of several and return its exit code: 0 done, 2 bad input, 3 another process lost.

    `fate` weights the tokens if it is `weighted`, and kills the last process if it is `killed`.
    """
    try:
        with join_ranks("cpu", timeout_s=60) as ranks:

            def progress(done: int) -> None:
                if fate == "killed" and ranks.rank == ranks.size - 1 and done >= 8:
                    os.kill(os.getpid(), signal.SIGKILL)

            options = WEIGHTED if fate == "weighted" else SYSTEM
            moments = calibrated(Path(path), options=options, ranks=ranks, progress=progress)
            if ranks.rank == 0:
                save_moments(moments, Path(output))
    except (BadInput, RankLost) as error:
        sys.stdout.write(str(error))
        return 2 if isinstance(error, BadInput) else 3
    return 0
