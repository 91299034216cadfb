"""CORP's attention system restricted to kept dimensions against the whole system, and its refusals."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result

from calib.calibrate import ResumeFile
from calib.moments import HeadMoments, Moments
from calib.store import load_moments
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from tests import tiny
from tests.command import invoked, refused, refuses, run
from tests.doubles import some
from tests.recipes import recipe

ALIGN = "head=8"
RESTRICTED = ("--attention-system", "--attn", "0.5,0.75", "--align", ALIGN)


def dense() -> Checkpoint:
    """Return a model with two heads of 32, which have several widths."""
    return tiny.checkpoint(embed_dim=64, num_heads=2)


def calibrated(home: Path, name: str, *extra: object, images: str = "images.npy") -> Path:
    path = home / name
    invoked("calibrate", "--model", home / "dense", "--images", home / images, "-o", path, *extra)
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("home")
    save(dense(), root / "dense")
    images = tiny.images(20)
    np.save(root / "images.npy", images)
    np.save(root / "a.npy", images[:8])
    np.save(root / "b.npy", images[8:])
    calibrated(root, "whole.safetensors", "--attention-system")
    calibrated(root, "kept.safetensors", *RESTRICTED)
    return root


def reduced(home: Path, output: Path, moments: str, share: float, *extra: object, code: int = 0) -> Result:
    named = ("--model", home / "dense", "--moments", home / moments, "-o", output, "--json")
    return invoked("reduce", *named, "--preset", "corp", "--attn", share, "--align", ALIGN, *extra, code=code)


def assert_same_recoveries(checkpoint: Checkpoint, exact: Moments, found: Moments, width: int) -> None:
    method = method_from_preset("corp", attention_sparsity=1 - width / 32, align_head=8)
    one, other = (reduce(checkpoint.model, moments, method) for moments in (exact, found))
    for site, own in zip(one.sites, other.sites, strict=True):
        assert (own.error, own.energy) == pytest.approx((site.error, site.energy), rel=1e-9)
    for name, tensor in one.model.state_dict().items():
        torch.testing.assert_close(other.model.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [8, 16])
def test_two_passes_in_one_call_equal_the_full_system(home: Path, width: int) -> None:
    """One file serves both requested sparsities."""
    found = load_moments(home / "kept.safetensors")
    assert_same_recoveries(load_checkpoint(home / "dense"), load_moments(home / "whole.safetensors"), found, width)
    site = found.sites["blocks.0.attn.qk"]
    assert isinstance(site, HeadMoments)
    assert some(site.system_HTT).shape == (2, 136, 136)


def test_first_pass_ranks_dimensions_for_the_second(home: Path, tmp_path: Path) -> None:
    first = calibrated(home, "first.safetensors")
    second = calibrated(home, "second.safetensors", *RESTRICTED, "--moments", first)
    assert second.read_bytes() == (home / "kept.safetensors").read_bytes()


def test_wider_head_than_covered_is_refused_with_the_available_widths(home: Path, tmp_path: Path) -> None:
    refused(
        reduced(home, tmp_path / "r", "kept.safetensors", 0.25, code=2),
        "blocks.0.attn.qk: a head width of 24 was asked for",
        "covers 16 of 32 dimensions; expected a width of 8, 16",
        "calibrate --attention-system --attn 0.25",
    )
    assert not (tmp_path / "r").exists()


def test_full_width_needs_no_system(home: Path) -> None:
    checkpoint = load_checkpoint(home / "dense")
    method = method_from_preset("corp", attention_sparsity=0.0)
    result = reduce(checkpoint.model, load_moments(home / "kept.safetensors"), method)
    assert all(site.error == 0.0 for site in result.sites)


def test_held_out_images_use_the_same_kept_dims(home: Path, tmp_path: Path) -> None:
    errors = []
    for name, words in (("h-whole.safetensors", ("--attention-system",)), ("h-kept.safetensors", RESTRICTED)):
        path = calibrated(home, name, *words, "--hold-out", 6)
        held_out = path.with_name(f"{path.stem}.held-out.safetensors")
        done = reduced(home, tmp_path / name, name, 0.5, "--held-out", held_out)
        errors.append([site["held_out"]["error"] for site in json.loads(done.stdout)["sites"]])
    assert errors[1] == pytest.approx(errors[0], rel=1e-9)
    others = calibrated(home, "others.safetensors", *RESTRICTED, images="a.npy")
    parts = calibrated(home, "part.safetensors", *RESTRICTED, images="b.npy")
    foreign = reduced(home, tmp_path / "o", parts.name, 0.5, "--held-out", others, code=2)
    refused(foreign, "leaves out dimensions that are kept here")


def test_parts_ranked_by_one_first_pass_merge(home: Path, tmp_path: Path) -> None:
    first = calibrated(home, "rank.safetensors")
    ranked = (*RESTRICTED, "--moments", first)
    parts = [calibrated(home, f"{name}.safetensors", *ranked, images=f"{name}.npy") for name in "ab"]
    invoked("calibrate", "--merge", *parts, "-o", home / "merged.safetensors")
    exact, found = load_moments(home / "whole.safetensors"), load_moments(home / "merged.safetensors")
    assert_same_recoveries(load_checkpoint(home / "dense"), exact, found, 16)
    alone = [calibrated(home, f"{name}-alone.safetensors", *RESTRICTED, images=f"{name}.npy") for name in "ab"]
    merge = ("calibrate", "--merge", *alone, "-o", tmp_path / "m.safetensors")
    refuses("choose these for both by the moments of one first pass", *merge)


def test_both_passes_resume_from_their_own_state(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = ("--batch-size", 8, "--checkpoint-every", 8)
    with monkeypatch.context() as patched:
        patched.setattr(ResumeFile, "clear", lambda self: None)  # as if the machine had stopped before the last step
        calibrated(home, "saved.safetensors", *RESTRICTED, *every)
    states = sorted(path.name for path in home.glob("saved*partial*"))
    assert states == ["saved.first.partial.safetensors", "saved.partial.safetensors"]
    before = (home / "saved.safetensors").read_bytes()
    assert calibrated(home, "saved.safetensors", *RESTRICTED, *every).read_bytes() == before
    assert not list(home.glob("saved*partial*"))


def limit_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("calib.memory", "calib.calibrate"):
        monkeypatch.setattr(f"{name}.bytes_available", lambda device: 3_000_000)


def test_command_printed_by_an_out_of_memory_message_works(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(monkeypatch)
    output = tmp_path / "with space.safetensors"
    kwargs = json.dumps({**tiny.ARCHITECTURE.kwargs, "embed_dim": 64, "num_heads": 2})
    weights = home / "dense" / "model.safetensors"
    named = ("--model", tiny.ARCHITECTURE.name, "--model-kwargs", kwargs, "--no-ema", "--weights", weights)
    words = (*named, "--images", home / "images.npy", "--samples", 12, "-o", output)
    result = invoked("calibrate", *words, "--attention-system", code=2)
    printed = re.search(r"corp-deploy (calibrate .*)", result.stderr)
    assert printed, result.stderr
    invoked(*shlex.split(printed[1]))
    assert load_moments(output).images == 12
    share = float(shlex.split(printed[1])[-1])
    invoked("reduce", *named, "--moments", output, "--preset", "corp", "--attn", share, "-o", tmp_path / "r")


def test_no_command_is_printed_if_none_fits(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calib.memory.bytes_available", lambda device: 1000)
    words = ("--model", home / "dense", "--images", home / "images.npy", "-o", tmp_path / "m.safetensors")
    result = invoked("calibrate", *words, "--attention-system", code=2)
    assert "what fits" not in result.stderr
    assert "use a larger machine" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--attn", "0.5"), "give --attention-system with it"),
        (("--attention-system", "--align", "head=8"), "belong to --attention-system --attn S"),
        (("--attention-system", "--moments", "m.safetensors"), "belong to --attention-system --attn S"),
        (("--attention-system", "--no-attention"), "exclude each other"),
        (("--attention-system", "--attn", "0.5", "--sites", "*.mlp.fc2"), "none of the sites"),
    ],
)
def test_attention_system_without_widths_is_refused(
    home: Path, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    named = ("--model", home / "dense", "--images", home / "images.npy", "-o", tmp_path / "m.safetensors")
    refuses(message, "calibrate", *named, *words)
    assert not (tmp_path / "m.safetensors").exists()


def test_dimensions_of_another_ranking_are_refused(home: Path, tmp_path: Path) -> None:
    select = ("--select", "head=magnitude")
    other = reduced(home, tmp_path / "r", "kept.safetensors", 0.5, *select, code=2)
    refused(other, "the ranking by magnitude keeps dimensions that the system in these moments leaves out")
    reduced(home, tmp_path / "w", "whole.safetensors", 0.5, *select)


STAGES = ("--only", "dense", "--only", "moments")


def write_recipe(folder: Path, **calibration: str) -> None:
    images: dict[str, Any] = {"images": "images.npy"}
    reduction = {"preset": "corp", "attn": 0.5, "align_head": 8}
    tables = {"calibration": images | {"batch_size": 4, "hold_out": 4} | calibration, "held_out": images}
    (folder / "recipe.toml").write_text(recipe(tables | {"reduce": reduction}))


def release_home(home: Path, folder: Path, **calibration: str) -> Path:
    shutil.copytree(home / "dense", folder / "dense")
    shutil.copy2(home / "images.npy", folder)
    write_recipe(folder, **calibration)
    return folder


@pytest.mark.slow("models")
def test_release_resumes_from_the_states_of_both_passes(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release is interrupted twice in each pass."""
    monkeypatch.setattr("corp_deploy.release.model_stages.SAVE_EVERY_IMAGES", 8)
    folder = release_home(home, tmp_path, attention_system="kept")
    moments = ".stages/moments.safetensors"
    invoked("release", folder / "recipe.toml", "-o", folder / "straight", *STAGES)
    saves: list[str] = []
    save_state = ResumeFile.save

    def interrupted(self: ResumeFile, *words: Any) -> None:
        save_state(self, *words)
        saves.append(self.path.name)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ResumeFile, "save", interrupted)
        for _ in range(4):
            run("release", folder / "recipe.toml", "-o", folder / "out", *STAGES)
    assert [".first." in name for name in saves] == [True, True, False, False]
    invoked("release", folder / "recipe.toml", "-o", folder / "out", *STAGES)
    assert (folder / "out" / moments).read_bytes() == (folder / "straight" / moments).read_bytes()
    assert not list((folder / "out" / ".stages").glob("unfinished*"))


def test_release_beyond_memory_names_the_recipe_key(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = release_home(home, tmp_path)
    limit_memory(monkeypatch)
    words = ("release", folder / "recipe.toml", "-o", folder / "out", *STAGES)
    refuses('attention_system = "kept" under [calibration], where reduce.attn is 0.5 or more', *words)
    write_recipe(folder, attention_system="kept")
    invoked("release", folder / "recipe.toml", "-o", folder / "out", *STAGES)
