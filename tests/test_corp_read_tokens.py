"""The tokens that a closed loop's last block is fitted to: those that move the outputs, by moving each one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from calib.collect import collect
from calib.images import Images
from corp_deploy.cli import main
from corp_deploy.families import timm_vit as vit
from corp_deploy.families.sites import calibration_taps
from corp_deploy.reduction.closed_loop import Loop, reduce_closed_loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.read_tokens import named, tokens_read, tokens_to_fit
from corp_deploy.store.checkpoint import save
from corp_deploy.store.inputs import model_digest, preprocessing_text
from tests import tiny

SMALL = tiny.ARCHITECTURE.kwargs
PLAIN, DISTILLED = tiny.ARCHITECTURE.name, "deit_tiny_distilled_patch16_224"

MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "class token": (PLAIN, {}, "class token"),
    "distilled": (DISTILLED, {}, "class token and distillation token"),
    "registers": (PLAIN, {"reg_tokens": 4}, "class token"),
    "average": (PLAIN, {"global_pool": "avg"}, "16 patch tokens"),
    "average beside registers": (PLAIN, {"global_pool": "avg", "reg_tokens": 2}, "16 patch tokens"),
    "average and maximum": (PLAIN, {"global_pool": "avgmax"}, "16 patch tokens"),
    "maximum": (PLAIN, {"global_pool": "max"}, "16 patch tokens"),
    "attention pool": (PLAIN, {"global_pool": "map", "class_token": False}, "all 16 tokens"),
    "no classifier": (PLAIN, {"num_classes": 0}, "class token"),
    "tokens": (PLAIN, {"num_classes": 0, "global_pool": ""}, "all 17 tokens"),
    "classified tokens": (PLAIN, {"global_pool": ""}, "all 17 tokens"),
}


def model_of(name: str, **changes: Any) -> nn.Module:
    model = tiny.timm_model(name, **{**SMALL, **changes})
    tiny.enliven(model, 0)
    return model


def moved(model: nn.Module, token: int | None) -> Tensor:
    """The outputs for a few images with one token behind the last block replaced by another one."""

    def shift(_: nn.Module, __: tuple[Tensor, ...], out_BNC: Tensor) -> Tensor:
        other_BNC = out_BNC.clone()
        if token is not None:
            other_BNC[:, token] = 5.0 * torch.randn(out_BNC[:, token].shape, generator=torch.Generator().manual_seed(1))
        return other_BNC

    handle = tiny.last_block(model).register_forward_hook(shift)
    with torch.inference_mode():
        outputs: Tensor = model(torch.from_numpy(tiny.images(4)))
    handle.remove()
    return outputs


@pytest.mark.parametrize("kind", MODELS)
def test_the_tokens_read_are_those_that_move_the_outputs(kind: str) -> None:
    name, changes, words = MODELS[kind]
    model = model_of(name, **changes)
    count, still = len(vit.token_kinds(model)), moved(model, None)
    moving = [token for token in range(count) if not torch.equal(moved(model, token), still)]
    assert tokens_read(model).tolist() == moving
    assert named(model, tokens_to_fit(model, "pooled")) == words
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("kind", MODELS)
def test_all_are_taken_when_asked_for_or_when_there_is_no_classifier(kind: str) -> None:
    name, changes, words = MODELS[kind]
    model = model_of(name, **changes)
    assert tokens_to_fit(model, "all") is None
    every = f"all {len(vit.token_kinds(model))} tokens"
    assert named(model, tokens_to_fit(model)) == (every if changes.get("num_classes") == 0 else words)


def test_a_model_whose_outputs_nothing_moves_is_fitted_to_all_tokens() -> None:
    model = model_of(PLAIN)
    with torch.no_grad():
        model.head.weight.zero_()  # type: ignore[union-attr, operator]
    assert tokens_to_fit(model) is None


def opened(model: nn.Module, directory: Path, count: int) -> Images:
    return tiny.opened(directory / "images.npy", tiny.images(count), model)


def features(model: Any, count: int = 64) -> Tensor:
    with torch.inference_mode():
        tokens: Tensor = model.forward_features(torch.from_numpy(tiny.images(count, seed=9)))
    return tokens.double()


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


HALF = method_from_preset("best", mlp_sparsity=0.5, attention_sparsity=0.5, align_hidden=8, align_head=8)


def test_both_heads_of_a_distilled_model_gain_by_the_loop(tmp_path: Path) -> None:
    model: Any = model_of(DISTILLED, depth=4)
    images = opened(model, tmp_path, 192)
    lineage = {"model": model_digest(model), "preprocessing": preprocessing_text(model)}
    moments = collect(
        model, calibration_taps(model, vit.sites(model)), images.batches(32), device="cpu", lineage=lineage
    )
    reduced = {"open": reduce(model, moments, HALF).model, "closed": reduce_closed_loop(model, images, HALF).model}

    def by_head(one: Any) -> list[Tensor]:
        tokens = features(one).float()
        with torch.inference_mode():
            return [one.head(tokens[:, 0]), one.head_dist(tokens[:, 1])]

    for place, dense in enumerate(by_head(model)):
        errors = {name: relative_error(by_head(each)[place], dense) for name, each in reduced.items()}
        assert errors["closed"] < 0.9 * errors["open"], (place, errors)


def test_patch_tokens_of_a_backbone_gain_by_being_fitted_to(tmp_path: Path) -> None:
    model = model_of(PLAIN, depth=3, num_classes=0, reg_tokens=2)
    images, dense = opened(model, tmp_path, 128), features(model)
    errors = {}
    for reads in (None, "all", "pooled"):
        reduction = reduce_closed_loop(model, images, HALF, loop=Loop(reads=reads))
        words = "class token" if reads == "pooled" else "all 19 tokens"
        assert reduction.said == (f"closed loop fitted to: {words}",)
        found = features(reduction.model)
        errors[reads] = relative_error(found[:, 1:], dense[:, 1:]), relative_error(found[:, :1], dense[:, :1])
    assert errors[None] == errors["all"]
    assert errors["all"][0] < 0.98 * errors["pooled"][0]
    assert errors["pooled"][1] < errors["all"][1]


def test_the_command_says_which_tokens_and_writes_it_down(tmp_path: Path) -> None:
    checkpoint = tiny.checkpoint()
    save(checkpoint, tmp_path / "dense")
    np.save(tmp_path / "images.npy", tiny.images(8))

    def run(*words: object) -> Any:
        return CliRunner().invoke(main, [str(word) for word in words])

    where = ["--model", tmp_path / "dense", "--images", tmp_path / "images.npy"]
    assert run("calibrate", *where, "-o", tmp_path / "m.safetensors").exit_code == 0
    given = [*where, "--moments", tmp_path / "m.safetensors", "--mlp", "0.5", "--align", "mlp=8", "--closed-loop"]
    for reads, words in ((["--reads", "all"], "all 17 tokens"), ([], "class token")):
        result = run("reduce", *given, *reads, "-o", tmp_path / "reduced")
        assert result.exit_code == 0, result.output
        assert f"closed loop fitted to: {words}" in result.stdout
        lineage = json.loads((tmp_path / "reduced" / "config.json").read_text())["lineage"]
        assert lineage["reduction"]["decided"] == [f"closed loop fitted to: {words}"]
