"""The tokens that a polish and a closed loop's last block are fitted to: those that move the outputs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corp_deploy.families import traced_model
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.read_tokens import tokens_to_fit
from corp_deploy.reduction.traced_loop import reduce_traced
from corp_deploy.traced.models.steps import StreamState
from tests import tiny
from tests.command import invoked

PLAIN, DISTILLED = tiny.ARCHITECTURE.name, "deit_tiny_distilled_patch16_224"
MODELS: dict[str, tuple[str, dict[str, Any], Sequence[int]]] = {
    "class token": (PLAIN, {}, [0]),
    "distilled": (DISTILLED, {}, [0, 1]),
    "registers": (PLAIN, {"reg_tokens": 4}, [0]),
    "average": (PLAIN, {"global_pool": "avg"}, range(1, 17)),
    "maximum": (PLAIN, {"global_pool": "max"}, range(1, 17)),
    "attention pool": (PLAIN, {"global_pool": "map", "class_token": False}, range(16)),
    "no classifier": (PLAIN, {"num_classes": 0}, [0]),
    "tokens": (PLAIN, {"num_classes": 0, "global_pool": ""}, range(17)),
}


def model_of(name: str, **changes: Any) -> nn.Module:
    model = tiny.timm_model(name, **{**tiny.ARCHITECTURE.kwargs, **changes})
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
def test_the_tokens_fitted_to_are_those_that_move_the_outputs(kind: str) -> None:
    """Of a backbone all, unless its outputs alone are to count."""
    name, changes, expected = MODELS[kind]
    model = model_of(name, **changes)
    count, still = len(traced_model.token_kinds(model)), moved(model, None)
    moving = [token for token in range(count) if not torch.equal(moved(model, token), still)]
    read = tokens_to_fit(model, "pooled")
    assert moving == list(expected)
    assert (list(range(count)) if read is None else read.tolist()) == moving
    assert tokens_to_fit(model, "all") is None
    assert (tokens_to_fit(model) is None) == (len(moving) == count or changes.get("num_classes") == 0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_whose_outputs_nothing_moves_is_fitted_to_all_tokens() -> None:
    model = model_of(PLAIN)
    with torch.no_grad():
        model.get_parameter("head.weight").zero_()
    assert tokens_to_fit(model) is None


def features(model: nn.Module) -> Tensor:
    """The last stream."""
    images = torch.from_numpy(tiny.images(64, seed=9))
    with torch.inference_mode():
        walk = StreamState.of(traced_model.embedded(model, images), None)
        for step in traced_model.steps(model):
            walk = walk.behind(step)
    return walk.tokens.x.double()


HALF = method_from_preset("best", mlp_sparsity=0.5, attention_sparsity=0.5, align_hidden=8, align_head=8)


def test_patch_tokens_of_a_backbone_gain_by_being_fitted_to(tmp_path: Path) -> None:
    model = model_of(PLAIN, num_classes=0, reg_tokens=2)
    images, dense, errors = tiny.opened(tmp_path / "images.npy", tiny.images(96), model), features(model), {}
    for reads in ("all", "pooled"):
        reduction = reduce_traced(model, images, HALF, loop=Loop(reads=reads))
        assert any("only places that outputs read" in said for said in reduction.decisions) == (reads == "pooled")
        found = features(reduction.model)
        errors[reads] = tiny.relative(found[:, 1:], dense[:, 1:]), tiny.relative(found[:, :1], dense[:, :1])
    assert errors["all"][0] < 0.98 * errors["pooled"][0]
    assert errors["pooled"][1] < errors["all"][1]


def test_the_command_says_which_tokens_and_writes_it_down(tmp_path: Path) -> None:
    tiny.written(tmp_path, 8)
    where = ["--model", tmp_path / "dense", "--images", tmp_path / "images.npy"]
    invoked("calibrate", *where, "-o", tmp_path / "m.safetensors")
    given = [*where, "--moments", tmp_path / "m.safetensors", "--mlp", "0.5", "--align", "mlp=8", "--closed-loop"]
    for reads, is_said in ((["--reads", "all"], False), ([], True)):
        result = invoked("reduce", *given, *reads, "-o", tmp_path / "reduced")
        lineage = json.loads((tmp_path / "reduced" / "config.json").read_text())["lineage"]
        decided = " ".join(lineage["reduction"]["decided"])
        assert ("only places that outputs read count in the fits of blocks.1" in decided) == is_said
        assert ("only places that outputs read" in " ".join(result.stdout.split())) == is_said
