"""calib.calibrate over convolutions: several processes and interruptions change nothing."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from calib import patch_sums
from calib.calibrate import calibrate
from calib.distributed import Ranks, joined_ranks
from calib.images import open_images
from calib.moments import Moments
from calib.resume import ResumeFile
from calib.store import load, save
from ground.errors import BadInput, RankLost
from tests.ranks import exits_of
from tests.tiny_maps import images_of, patch_moments, relative, sums_of, taps_of, tiny_maps

COUNT = 21


class Interrupted(Exception):
    """Stands for Ctrl-C."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "images.npy", images_of(COUNT).numpy())
    return tmp_path / "images.npy"


def calibrated(
    path: Path, *, checkpoint: ResumeFile | None = None, ranks: Ranks | None = None, stop: int = COUNT + 1
) -> Moments:
    def no_transform(picture: object) -> Tensor:
        raise AssertionError(picture)

    def progress(done: int) -> None:
        if done >= stop:
            raise Interrupted

    model = tiny_maps()
    images = open_images(path, image_shape=(3, 11, 13), transform=no_transform, max_bad=0)
    return calibrate(
        model, taps_of(model), images, batch_size=4, device="cpu", lineage={"model": "m", "preprocessing": "p"},
        checkpoint=checkpoint, ranks=ranks or Ranks(), progress=progress,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [0, 192])
def test_a_resumed_run_gives_the_bits_of_an_uninterrupted_one(
    path: Path, tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch_sums, "CPU_ROWS", rows)
    checkpoint = ResumeFile(path=tmp_path / "state.safetensors", every=8)
    with pytest.raises(Interrupted):
        calibrated(path, checkpoint=checkpoint, stop=12)
    resumed, whole = calibrated(path, checkpoint=checkpoint), calibrated(path)
    for name in whole.sites:
        for field, value in sums_of(patch_moments(resumed, name)).items():
            assert torch.equal(value, sums_of(patch_moments(whole, name))[field]), (name, field)


def test_several_processes_give_the_moments_of_one(path: Path, tmp_path: Path) -> None:
    output = tmp_path / "moments.safetensors"
    exits = exits_of(__name__, 2, path, output)
    assert [code for code, _ in exits] == [0, 0], exits
    got, expected = load(output), calibrated(path)
    for name in expected.sites:
        one, other = patch_moments(got, name), patch_moments(expected, name)
        assert (one.tokens, one.map_tokens) == (other.tokens, other.map_tokens)
        for field, value in sums_of(one).items():
            assert relative(value, sums_of(other)[field]) < 2e-6, (name, field)


def one_of_several(path: str, output: str) -> int:
    """The first sums Grams as narrow ones are, the second as wide ones. Exit codes: 0 done, 2 bad input, 3 lost."""
    try:
        with joined_ranks("cpu", timeout_s=60) as ranks:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(patch_sums, "CPU_ROWS", 192 * (1 - ranks.rank))
                moments = calibrated(Path(path), ranks=ranks)
            if not ranks.rank:
                save(moments, Path(output))
    except (BadInput, RankLost) as error:
        sys.stdout.write(str(error))
        return 2 if isinstance(error, BadInput) else 3
    return 0
