"""The public collector: the same moments as calibrate, in parts, after pickling, and merged without doubles."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import corp_deploy
from calib.store import load_moments
from corp_deploy.store.checkpoint import save as save_model
from tests import tiny
from tests.command import run
from tests.refusals import rejects
from tests.sums import assert_equal

IMAGES = torch.from_numpy(tiny.images(24))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("collector") / "dense"
    save_model(tiny.checkpoint(), path)
    return path


def collected(model: Any, batches: Any, path: Path, **options: Any) -> corp_deploy.Calibration:
    collector = corp_deploy.Collector(model, **options)
    for batch in batches:
        collector.update(batch)
    return collector.moments(path)


def test_collector_writes_what_calibrate_writes_byte_for_byte(dense: Path, tmp_path: Path) -> None:
    found = collected(dense, [(each, 0) for each in IMAGES.split(8)], tmp_path / "c.safetensors", attention_system=True)
    corp_deploy.calibrate(dense, IMAGES, tmp_path / "a.safetensors", batch_size=8, attention_system=True)
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()
    assert found.inputs == 24
    assert found.moments.images == 24


@pytest.mark.parametrize("at", [0, 1, 2])
def test_pickled_collector_continues_to_the_same_bits(dense: Path, tmp_path: Path, at: int) -> None:
    collector = corp_deploy.Collector(dense)
    for number, batch in enumerate(IMAGES.split(8)):
        if number == at:
            collector = pickle.loads(pickle.dumps(collector))
        collector.update(batch)
    pickle.loads(pickle.dumps(collector)).moments(tmp_path / "c.safetensors")
    collected(dense, IMAGES.split(8), tmp_path / "a.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


def test_module_in_memory_shows_its_inputs_by_the_first_batch_and_leaves_no_hook(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, images = Net(), torch.randn(8, 3, 2, 2)
    collector = pickle.loads(pickle.dumps(corp_deploy.Collector(module)))
    collector.update(images)
    again = pickle.loads(pickle.dumps(collector))
    again.moments(tmp_path / "c.safetensors")
    corp_deploy.calibrate(module, images, tmp_path / "a.safetensors", batch_size=8)
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())


def test_merged_parts_are_the_moments_of_all_images(dense: Path, tmp_path: Path) -> None:
    parts = [tmp_path / f"{number}.safetensors" for number in range(3)]
    collector = corp_deploy.Collector(dense)
    for path, images in zip(parts, IMAGES.split(8), strict=True):
        collector.update(images)
        collector.moments(path)
        collector.clear()
    merged = corp_deploy.merge_moments(parts, tmp_path / "merged.safetensors")
    whole = collected(dense, IMAGES.split(8), tmp_path / "whole.safetensors")
    assert merged.inputs == 24
    assert_equal(merged.moments, whole.moments, 1e-6)


def test_digest_names_the_content_however_it_is_batched(dense: Path, tmp_path: Path) -> None:
    one, other = (corp_deploy.Collector(dense) for _ in range(2))
    one.update(IMAGES[:16])
    for images in IMAGES[:16].split(4):
        other.update(images)
    assert one.digest == other.digest == one.moments(tmp_path / "part.safetensors").moments.lineage["images"]
    one.clear()
    one.update(IMAGES[1:17])
    assert one.digest != other.digest


def test_model_and_memory_are_checked_once_in_a_process(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = list[object]()
    monkeypatch.setattr("corp_deploy.api.collecting.require_steady_on", lambda *given: checked.append(given))
    collector = corp_deploy.Collector(dense)
    for images in IMAGES.split(8):
        collector.clear()
        collector.update(images)
    assert len(checked) == 1
    pickle.loads(pickle.dumps(collector)).update(IMAGES[:8])
    assert len(checked) == 2


def test_arrays_in_shared_memory_are_read_only_and_copied(dense: Path) -> None:
    images = IMAGES[:8].numpy().copy()
    images.flags.writeable = False
    collector = corp_deploy.Collector(dense)
    collector.update(images)  # a warning would fail the test
    assert collector.images == 8


def test_merge_refuses_an_image_twice_and_names_the_parts(dense: Path, tmp_path: Path) -> None:
    a, b, c = (tmp_path / f"{name}.safetensors" for name in "abc")
    collected(dense, [IMAGES[:8]], a)
    collected(dense, [IMAGES[8:16]], b)
    collected(dense, [IMAGES[14:24]], c)
    said = f"{b} and {c} both have 2 of the same images"
    rejects(said, corp_deploy.merge_moments, [a, b, c], tmp_path / "m.safetensors")
    rejects("moments to merge: got no file", corp_deploy.merge_moments, [], tmp_path / "m.safetensors")
    assert said in run("calibrate", "--merge", a, b, c, "-o", tmp_path / "m.safetensors").output.replace("\n", " ")
    assert not (tmp_path / "m.safetensors").exists()
    assert corp_deploy.merge_moments([a], tmp_path / "m.safetensors").inputs == 8, "a cluster may have a single part"
    assert (tmp_path / "m.safetensors").read_bytes() == a.read_bytes()


def test_collector_refuses_without_losing_what_it_has(dense: Path, tmp_path: Path) -> None:
    collector = corp_deploy.Collector(dense)
    rejects("no batch was collected; call update first", collector.moments, tmp_path / "m.safetensors")
    collector.update(IMAGES[:8])
    rejects("inputs: got float64", collector.update, IMAGES.double())
    spoilt = IMAGES[8:10].clone()
    spoilt[1] = np.nan
    rejects("NaN or Inf", collector.update, spoilt)
    collector.update(IMAGES[10:16])
    assert collector.images == 14
    rejects(
        "`attn` ranks dimensions by a pass of its own",
        corp_deploy.Collector,
        dense,
        attention_system=True,
        attn=[0.5],
    )
    tolerant = corp_deploy.Collector(dense, max_bad=1)
    tolerant.update(spoilt)
    assert tolerant.images == 1


def test_shards_of_a_command_merge_to_all_images(dense: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", IMAGES.numpy())
    words = ("calibrate", "--model", dense, "--images", tmp_path / "images.npy", "--batch-size", "4", "--quiet")
    parts = [tmp_path / f"{index}.safetensors" for index in (1, 2, 3)]
    for index, path in enumerate(parts, 1):
        assert run(*words, "--shard", f"{index}/3", "-o", path).exit_code == 0
    assert run("calibrate", "--merge", *parts, "-o", tmp_path / "merged.safetensors").exit_code == 0
    assert run(*words, "-o", tmp_path / "whole.safetensors").exit_code == 0
    merged, whole = (load_moments(tmp_path / f"{name}.safetensors") for name in ("merged", "whole"))
    assert_equal(merged, whole, 1e-6)


@pytest.mark.parametrize(
    ("shard", "more", "said"),
    [
        ("4/3", (), "expected I/N with I from 1 to N, such as 1/4"),
        ("0/3", (), "expected I/N"),
        ("half", (), "expected I/N"),
        ("1/30", (), "got 24 images, fewer than the 30 shards"),
        ("1/3", ("--hold-out", "3"), "--shard and --hold-out exclude each other"),
        ("1/3", ("--snapshots", "2,4"), "--shard and --snapshots exclude each other"),
    ],
)
def test_other_shards_are_refused(dense: Path, tmp_path: Path, shard: str, more: tuple[str, ...], said: str) -> None:
    np.save(tmp_path / "images.npy", IMAGES.numpy())
    words = ("calibrate", "--model", dense, "--images", tmp_path / "images.npy", "-o", tmp_path / "m.safetensors")
    done = run(*words, "--shard", shard, *more)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
    assert not (tmp_path / "m.safetensors").exists()
