"""The real encoder's benchmark, on an encoder and crops that take seconds."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from benchmarks.quality.procedural_images import TEXTURES
from benchmarks.real import commands, real_vit, subject
from benchmarks.real.head import SaliencyHead
from benchmarks.real.measures import Outputs, figures, outputs
from benchmarks.real.mosaics import class_maps, linear_head
from benchmarks.real.rows import METHODS, Method, Settings, Sparsities, words
from corp_deploy.cli import main as corp_deploy
from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.spec.merging import Merging
from corp_deploy.store.input_sets import images_for_model
from tests import tiny
from tests.refusals import rejects

pytestmark = pytest.mark.nightly

KWARGS = {"img_size": 32, "patch_size": 8, "num_classes": 0}


@pytest.fixture
def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve crops of three pictures to calibrate on, six of two others, a model and a head; commands run in here."""
    directory = tmp_path / "ready"
    directory.mkdir()
    checkpoint = tiny.checkpoint(**KWARGS)
    monkeypatch.setattr(subject, "ARCHITECTURE", checkpoint.architecture)
    save_file(checkpoint.model.state_dict(), directory / "dinov2_s.safetensors")
    save_file(lively_head().state_dict(), directory / "head.safetensors")
    for name, count, pictures in (("calib", 12, 3), ("held", 6, 2)):
        np.save(directory / f"{name}.npy", tiny.images(count, seed=count))
        names = [f"{name}-{position % pictures}.jpg" for position in range(count)]
        (directory / f"{name}_groups.json").write_text(json.dumps(names))
    monkeypatch.setattr(subject, "run", in_this_process)
    return directory


def lively_head() -> SaliencyHead:
    """Random weights that find some of each picture salient."""
    torch.manual_seed(0)
    head = SaliencyHead((48, 16, 8)).eval()
    with torch.no_grad():
        head.final_conv.weight.mul_(50.0)
        head.final_conv.weight.sub_(head.final_conv.weight.mean())
    return head


SAID: list[list[str]] = []


def in_this_process(said: Sequence[str], threads: int) -> commands.Cost:
    done = CliRunner().invoke(corp_deploy, [*said, "--quiet"])
    assert done.exit_code == 0, done.output
    SAID.append(list(said))
    return commands.Cost(cpu_s=2.0, wall_s=3.0, peak_mb=100.0)


def run(ready: Path, *more: str) -> dict[str, Any]:
    """The record, and the commands that this run needed in SAID."""
    SAID.clear()
    output = ready.parent / "real_vit.json"
    given = ["--output", str(output), "--ready", str(ready), "--work", str(ready.parent / "work")]
    threads = torch.get_num_threads()
    try:
        done = CliRunner().invoke(real_vit.main, [*given, "--crops", "12", "--held-out", "6", *more])
    finally:
        torch.set_num_threads(threads)
    assert done.exit_code == 0, (done.output, done.exception)
    record: dict[str, Any] = json.loads(output.read_text())
    return record


@pytest.mark.slow("models")
def test_a_run_goes_on_where_another_stopped_and_makes_anew_what_is_asked(
    ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best, none = (next(method for method in METHODS if method.name == name) for name in ("best, closed loop", "none"))
    monkeypatch.setattr(real_vit, "METHODS", (none, best))
    first = run(ready, "--rows", "best*", "--shares", "0.8")
    assert [words[0] for words in SAID] == ["calibrate", "reduce"]
    (row,) = first["rows"]
    assert row["command"].startswith("reduce --preset best --mlp 0.")
    assert row["macs_share"] <= 0.8
    assert 0.0 < row["class_error"] < 1.0
    assert row["passes"] == pytest.approx(2.0 / first["bare_pass_s"])

    both = run(ready, "--shares", "0.8")
    assert [words[0] for words in SAID] == ["reduce"]
    assert [each["method"] for each in both["rows"]] == ["none", "best, closed loop"]
    assert both["rows"][1] == row
    assert both["rows"][0]["class_error"] > row["class_error"]
    assert both["bare_pass_s"] == first["bare_pass_s"]

    again = run(ready, "--rows", "none", "--shares", "0.8", "--again")
    assert [words[words.index("--preset") + 1] for words in SAID] == ["none"]
    assert len(again["rows"]) == 2
    assert run(ready, "--shares", "0.8") == again
    assert not SAID


def test_without_weights_it_skips_with_the_reason(tmp_path: Path) -> None:
    given = ["--output", str(tmp_path / "out.json"), "--ready", str(tmp_path)]
    done = CliRunner().invoke(real_vit.main, given)
    assert done.exit_code == 0
    assert done.output.startswith("skipped: ")
    assert "`make real` brings weights and photographs" in done.output
    assert not list(tmp_path.iterdir())


def test_figures_are_those_of_loops_over_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    class_BC, patches_BNC, saliency_BSS = (
        torch.rand(6, *shape, generator=generator) for shape in ((5,), (4, 5), (3, 3))
    )
    dense, reduced = (
        Outputs(
            class_BC=class_BC + noise * torch.randn(6, 5, generator=generator),
            patches_BNC=patches_BNC + noise * torch.randn(6, 4, 5, generator=generator),
            saliency_BSS=saliency_BSS + noise * torch.randn(6, 3, 3, generator=generator),
        )
        for noise in (0.0, 0.2)
    )
    got = figures(reduced, dense)
    one, other = (np.asarray(each.class_BC, np.float64) for each in (dense, reduced))
    squares = [sum((b - a) ** 2 for a, b in zip(*rows, strict=True)) for rows in zip(one, other, strict=True)]
    assert got["class_error"] == pytest.approx((sum(squares) / sum(a * a for a in one.flat)) ** 0.5)

    neighbours = []
    for rows in (one, other):
        unit = [row / sum(value**2 for value in row) ** 0.5 for row in rows]
        closest = [
            max((place for place in range(6) if place != own), key=lambda place: float(unit[own] @ unit[place]))
            for own in range(6)
        ]
        neighbours.append(closest)
    same = [a == b for a, b in zip(*neighbours, strict=True)]
    assert 0 < sum(same) < 6
    assert got["neighbour_agreement"] == sum(same) / 6

    assert dense.patches_BNC is not None
    assert reduced.patches_BNC is not None
    tokens = [np.asarray(each.patches_BNC, np.float64).reshape(-1, 5) for each in (dense, reduced)]
    cosines = sorted(float(a @ b) / (float(a @ a) * float(b @ b)) ** 0.5 for a, b in zip(*tokens, strict=True))
    assert got["cosine_mean"] == pytest.approx(sum(cosines) / 24)
    assert got["cosine_low"] == pytest.approx(np.quantile(cosines, 0.01))
    assert got["patch_error"] == pytest.approx(np.linalg.norm(tokens[1] - tokens[0]) / np.linalg.norm(tokens[0]))
    maps = [np.asarray(each.saliency_BSS, np.float64) for each in (dense, reduced)]
    salient = [{place for place, value in np.ndenumerate(each) if value > 0.5} for each in maps]
    assert got["saliency_iou"] == len(salient[0] & salient[1]) / len(salient[0] | salient[1])
    assert got["saliency_error"] == pytest.approx(np.linalg.norm(maps[1] - maps[0]) / np.linalg.norm(maps[0]))


@pytest.mark.slow("models")
def test_merged_tokens_are_given_back_to_their_patches_and_dropped_ones_are_not() -> None:
    model, images = tiny.checkpoint(**KWARGS).model, torch.from_numpy(tiny.images(6))
    head = lively_head()
    dense = outputs(model, images, head)
    assert dense.patches_BNC is not None
    assert dense.patches_BNC.shape == (6, 16, 48)
    nothing = outputs(traced_model.with_merging(model, Merging(schedule=(0, 0))), images, head)
    assert figures(nothing, dense)["patch_error"] < 1e-5
    merged = figures(outputs(traced_model.with_merging(model, Merging(schedule=(4, 4))), images, head), dense)
    assert 0.0 < merged["patch_error"] < 2.0
    assert 0.0 <= merged["saliency_iou"] <= 1.0
    dropping = traced_model.with_merging(model, Merging(schedule=(4, 4), how="drop"))
    dropped = figures(outputs(dropping, images, head), dense)
    assert dropped["patch_error"] is None
    assert dropped["saliency_iou"] is None
    assert dropped["class_error"] > 0.0


def test_the_least_uniform_sparsity_that_meets_a_share_is_taken() -> None:
    checkpoint = tiny.checkpoint(**KWARGS, embed_dim=192)
    settings = Settings(checkpoint.model)
    sparsities = settings.sparsities
    row = words(Method(name="m", reduce="--preset none --mlp {joint} --attn {joint}"), 0.7, settings)
    joint = float(row[3])
    assert row == ["--preset", "none", "--mlp", f"{joint:g}", "--attn", f"{joint:g}"]
    assert sparsities.left(joint, joint) <= 0.7 < sparsities.left(joint - 0.01, joint - 0.01)
    rejects(r"no uniform mlp sparsity leaves 0.05 of the MACs", sparsities.of, "mlp", 0.05)
    assert words(Method(name="m", reduce="--preset best --macs {share}"), 0.7, settings)[-1] == "0.7"


@pytest.mark.slow("models")
def test_the_fewest_merged_tokens_that_meet_a_share_are_taken() -> None:
    settings = Settings(tiny.checkpoint(**KWARGS, depth=4).model)
    for which, start in (("each", ""), ("grow", "grow:")):
        (text,) = words(Method(name="m", reduce=f"{{{which}}}"), 0.9, settings)
        count = int(text.removeprefix(start))
        assert text.startswith(start)
        assert settings.schedules.left(text) <= 0.9 < settings.schedules.left(f"{start}{count - 1}")
    rejects(r"merging 255 tokens leaves more than 0.1 of the MACs", settings.schedules.of, "each", 0.1)


@pytest.mark.slow("models")
def test_every_method_is_one_that_reduce_takes(tmp_path: Path) -> None:
    """Words that a command doesn't know would be noticed an hour into a run."""
    settings = Settings(tiny.checkpoint(**KWARGS, depth=4).model)
    for method in METHODS:
        said = words(method, 0.9, settings)
        given = ["--model", str(tmp_path), "--moments", str(tmp_path / "none"), "--output", str(tmp_path / "out")]
        done = CliRunner().invoke(corp_deploy, ["reduce", *given, *said])
        assert "no such file" in done.output.lower() or "does not exist" in done.output, (said, done.output)


def test_what_uniform_sparsities_leave_is_what_the_model_then_costs(tmp_path: Path) -> None:
    checkpoint = tiny.checkpoint(**KWARGS)
    np.save(tmp_path / "images.npy", tiny.images(4))
    moments = calibrate(checkpoint, images_for_model(checkpoint.model, tmp_path / "images.npy"), batch_size=4)
    sparsities = Sparsities(checkpoint.model)
    for mlp, attention in ((0.5, 0.5), (0.5, None)):
        method = method_from_preset("none", mlp_sparsity=mlp, attention_sparsity=attention)
        cost = macs(reduce(checkpoint.model, moments, method).model) / macs(checkpoint.model)
        assert sparsities.left(mlp, attention) == pytest.approx(cost)


def test_a_command_is_timed_and_its_failure_told() -> None:
    cost = commands.run(["doctor", "--help"], threads=1)
    assert cost.cpu_s > 0.0
    assert cost.peak_mb > 1.0
    with pytest.raises(Exception, match=r"(?s)corp-deploy reduce --nonsense ended with 2: .*nonsense"):
        commands.run(["reduce", "--nonsense"], threads=1)


def test_a_linear_head_finds_what_is_planted() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(len(TEXTURES), 12, generator=generator)
    classes = torch.randint(0, len(TEXTURES), (5, 40), generator=generator)
    patches = centres[classes] + 0.1 * torch.randn(5, 40, 12, generator=generator)
    head = linear_head(patches, classes)
    assert float((class_maps(head, patches) == classes).double().mean()) > 0.99
    x = np.concatenate([patches.flatten(0, 1).double().numpy(), np.ones((200, 1))], axis=1)
    exact = np.linalg.lstsq(x, np.eye(len(TEXTURES))[classes.flatten()], rcond=None)[0]
    own = np.concatenate([head.weight.double().numpy().T, head.bias.double().numpy()[None]])
    assert np.linalg.norm(x @ (own - exact)) < 0.05 * np.linalg.norm(x @ exact), "but for the ridge"
