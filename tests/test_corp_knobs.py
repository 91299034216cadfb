"""--select, --repair, --qk and --active-eps, each against float64 formulas on raw activations."""

import itertools
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from calib.store import load_moments
from corp_deploy.invocation.method_choice import RANKING, REPAIR
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.release.recipe_keys import record_of
from corp_deploy.store.checkpoint import load_checkpoint
from tests import tiny
from tests.command import invoked, refuses

FOLDER = TemporaryDirectory()
HOME = Path(FOLDER.name)
EPS = 0.4
Array = NDArray[np.float64]


@cache
def home() -> Path:
    """Return a folder with a model of one block, images, and moments with CORP's system and an own --active-eps."""
    tiny.written(HOME, 40, depth=1)
    words = ["--model", HOME / "dense", "--images", HOME / "images.npy", "--attention-system", "--active-eps", EPS]
    invoked("calibrate", *words, "-o", HOME / "m.safetensors", "-q")
    return HOME


def reduced(output: str, *options: object) -> nn.Module:
    where = ["--model", home() / "dense", "--moments", home() / "m.safetensors", "--align", "mlp=8,head=8"]
    invoked("reduce", *where, *options, "-o", home() / output, "-q")
    return load_checkpoint(home() / output).model


@cache
def activations() -> Array:
    """Return the input of fc2 [images * tokens, F]."""
    model = load_checkpoint(home() / "dense").model
    entering, _ = tiny.module_io(model, "blocks.0.mlp.fc2", np.load(home() / "images.npy"))
    return entering.flatten(0, 1).double().numpy()


def parameter(model: nn.Module, name: str) -> Array:
    return model.get_parameter(f"blocks.0.mlp.{name}").detach().double().numpy()


def weights() -> tuple[Array, Array]:
    model = load_checkpoint(home() / "dense").model
    return parameter(model, "fc2.weight"), parameter(model, "fc2.bias")


def score(how: str) -> Array:
    """Score the channels by a paper's formula."""
    x, (w, _) = activations(), weights()
    energy, norm = (x**2).mean(0), np.sqrt((w**2).sum(0))
    scores = {
        "energy": energy, "magnitude": norm, "combined": energy * norm, "active": (np.abs(x) > EPS).mean(0),
        "variance": x.var(0), "wanda": np.abs(w).sum(0) * np.sqrt(energy),
    }  # fmt: skip
    return np.asarray(scores[how])


def repaired(how: str, kept: Array) -> tuple[Array, Array]:
    """Return the second layer's weight and bias on the kept channels, repaired by least squares over all tokens."""
    x, (w, b) = activations(), weights()
    gone = np.setdiff1d(np.arange(x.shape[1]), kept)
    if how == "none":
        return w[:, kept], b
    if how == "bias":
        return w[:, kept], b + w[:, gone] @ x[:, gone].mean(0)
    ones = np.ones((len(x), 1)) if how == "affine" else np.zeros((len(x), 0))
    held = np.hstack((x[:, kept], ones))
    fit = np.linalg.lstsq(held, x[:, gone] @ w[:, gone].T, rcond=None)[0].T
    return w[:, kept] + fit[:, : len(kept)], b + (fit[:, -1] if how == "affine" else 0.0)


RANKED = ("energy", "magnitude", "combined", "active", "variance", "wanda")


PRESET_OF_REPAIR = {"none": "best", "affine": "none", "bias": "corp", "gram": "corp"}
SLOW = [
    pytest.param(*each, marks=pytest.mark.slow("models"))
    for each in (*itertools.product(RANKED, ("none", "affine")), ("obs", "affine"))
]


@pytest.mark.parametrize(("rank", "repair"), [("wanda", "bias"), ("wanda", "gram"), *SLOW])
def test_every_ranking_combines_with_every_channel_recovery(rank: str, repair: str) -> None:
    """Each runs on a preset that has another ranking or recovery."""
    preset = PRESET_OF_REPAIR[repair]
    options = ["--preset", preset, "--select", rank, "--repair", repair, "--mlp", 0.5, "--ridge", 1e-9]
    model = reduced(f"{rank}-{repair}", *options)
    dense = parameter(load_checkpoint(home() / "dense").model, "fc1.weight")
    kept = np.array([int((dense == row).all(1).nonzero()[0].item()) for row in parameter(model, "fc1.weight")])
    if rank != "obs":
        scores = score(rank)  # channels of equal score may replace each other
        np.testing.assert_allclose(np.sort(scores[kept]), np.sort(scores)[-96:], rtol=1e-9)
    weight, bias = repaired(repair, kept)
    x = activations()[:, kept]
    expected, got = x @ weight.T + bias, x @ parameter(model, "fc2.weight").T + parameter(model, "fc2.bias")
    assert np.linalg.norm(got - expected) < 2e-4 * np.linalg.norm(expected)


@pytest.mark.slow("models")
@pytest.mark.parametrize("qk", ["select", "logit-v1", "logit", "lowrank"])
def test_query_key_option_equals_its_preset(qk: str) -> None:
    """The option and the preset that contains it give the same weights."""
    preset = {"select": "none", "logit-v1": "corp-v1", "logit": "corp", "lowrank": "best"}[qk]
    other = "corp" if qk != "logit" else "none"
    one = reduced(f"qk-{qk}", "--preset", other, "--qk", qk, "--attn", 0.5, "--no-rotate")
    two = reduced(f"qk-by-{qk}", "--preset", preset, "--attn", 0.5, "--no-rotate")
    for name, weight in one.state_dict().items():
        torch.testing.assert_close(weight, two.state_dict()[name], rtol=0.0, atol=0.0)
    dense = reduced(f"qk-none-{qk}", "--preset", other, "--mlp", 0.0).state_dict()
    assert any(weight.shape != dense[name].shape for name, weight in one.state_dict().items() if name in dense)


def test_preset_without_attention_accepts_the_attention_option() -> None:
    model = reduced("grail-qk", "--preset", "grail", "--qk", "lowrank", "--attn", 0.5, "--mlp", 0.5)
    assert len(model.state_dict()["blocks.0.mlp.fc1.weight"]) == 96
    assert "lowrank" in json.dumps(json.loads((home() / "grail-qk" / "config.json").read_text())["lineage"])


def test_options_without_effect_are_refused() -> None:
    images = ("--images", home() / "images.npy")
    where = ["--model", home() / "dense", "--moments", home() / "m.safetensors", "-o", home() / "never"]
    for options, message in (
        (("--qk", "keep", "--attn", 0.5), "--attn 0.5 has no effect on preset best with --qk keep"),
        (("--mlp", 0.5, "--qk", "select"), "--qk select has no effect on a reduction that leaves attention alone"),
        (
            ("--mlp", 0.5, "--repair", "conv=gram"),
            "--repair conv=gram has no effect on sites that are not reduced; give --conv",
        ),
        (
            ("--attn", 0.5, "--select", "energy"),
            "--select energy has no effect on sites that are not reduced; give --mlp or --conv",
        ),
        *(
            (("--macs", 0.6, *images, *knob), "--macs 0.6 has no effect on preset best with " + " ".join(knob))
            for knob in (("--repair", "gram"), ("--select", "wanda"), ("--qk", "logit-v1"))
        ),
        (("--preset", "fold", "--mlp", 0.5, "--repair", "none"), "can't repair"),
        (
            ("--mlp", 0.5, "--closed-loop", *images, "--select", "active"),
            "the moments count |x| > 0.4 and the closed loop |x| > 0.001",
        ),
        (("--mlp", 0.5, "--repair", "nothing"), "'nothing': expected one of none, bias, gram, affine, or mlp= one of"),
        (("--mlp", 0.5, "--repair", "mlp=gram,mlp=bias"), "each at most once"),
    ):
        refuses(message, "reduce", *where, *options)
        assert not (home() / "never").exists()


def test_activity_threshold_is_stored_in_the_moments() -> None:
    mlp = load_moments(home() / "m.safetensors").sites["blocks.0.mlp.fc2"]
    assert mlp.eps == EPS  # type: ignore[union-attr]
    assert mlp.active_share_F.numpy() == pytest.approx((np.abs(activations()) > EPS).mean(0), abs=1e-3)  # type: ignore[union-attr]


RECIPE_KEYS: dict[str, dict[str, Any]] = {
    "energy": {"select": "energy", "conv": 0.5},
    "mlp=wanda,head=magnitude,conv=obs": {
        **{"select_mlp": "wanda", "select_head": "magnitude", "select_conv": "obs"},
        **{"attn": 0.5, "conv": 0.5},
    },
    "heads=grail": {"select_heads": "grail", "whole_heads": 0.5},
}


@pytest.mark.parametrize("text", RECIPE_KEYS)
def test_rankings_round_trip_as_text(text: str) -> None:
    choice = record_of(ReduceOptions, "reduce", {"preset": "corp", "mlp": 0.5, **RECIPE_KEYS[text]})
    assert choice.select == RANKING.from_text(text)
    assert str(choice.command_options["select"]) == text
    assert REPAIR.from_text("mlp=gram,conv=im2col,heads=none") == {"mlp": "gram", "conv": "im2col", "heads": "none"}
