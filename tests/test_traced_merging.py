"""Token merging in traced models: steps and layers, loops, what is refused."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from corp_deploy.families import traced_model
from corp_deploy.families.architecture import Architecture
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.traced_loop import reduce_traced
from corp_deploy.traced.models.layers import layered
from corp_deploy.traced.models.merging import Merging
from corp_deploy.traced.models.module import TracedModule
from corp_deploy.traced.models.steps import Merge, StreamState
from ground.errors import BadInput
from tests import timm_models, tiny
from tests.command import invoked

SCHEDULE = (3, 4)
FORMS: dict[str, tuple[dict[str, Any], ...]] = {
    "class token": ({}, {"how": "drop"}, {"metric": "stream"}),
    "registers": ({"metric": "keys"}, {"metric": "attended"}, {"how": "drop"}),
    "distilled": ({},),
    "mean": ({}, {"how": "drop"}),
    "attention pool": ({"metric": "keys"},),
    "no pool": ({}, {"unmerged": True}),
}


@cache
def merged(form: str, **options: Any) -> nn.Module:
    return traced_model.with_merging(timm_models.checkpoint(form).model, Merging(schedule=SCHEDULE, **options))


def outputs(model: nn.Module, count: int = 5, seed: int = 0) -> Tensor:
    return tiny.ran(model, tiny.images(count, seed))


@pytest.mark.slow("models")
@pytest.mark.parametrize(("options", "left"), [({}, 0.9), ({"how": "drop"}, 0.96)])
def test_a_closed_loop_repairs_what_merging_changed(options: dict[str, Any], left: float) -> None:
    """At full width, on images of the fit: the dense model's outputs are nearer than without a repair."""
    model, dense = merged("mean", **options), timm_models.checkpoint("mean").model
    full = timm_models.method(mlp_sparsity=0.0, attention_sparsity=0.0)
    repaired = reduce_traced(model, timm_models.opened(model, 64, 1), full, loop=Loop()).model
    assert traced_model.merging_of(repaired) == traced_model.merging_of(model)
    expected = outputs(dense, 64, 1)
    before, after = (float((outputs(each, 64, 1) - expected).norm()) for each in (model, repaired))
    assert after < left * before


class _Positioned(nn.Module):
    """Two attentions, positions added behind the first."""

    input_size = (3, 16, 16)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 3)
        self.qkv = nn.ModuleList([nn.Linear(8, 24), nn.Linear(8, 24)])
        self.places = nn.Parameter(torch.randn(1, 16, 8))

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        for qkv in self.qkv:
            q, k, v = qkv(x + self.places).reshape(-1, 16, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
            x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 16, 8)
        return self.head(x.mean(1))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "convnet": (lambda: timm.create_model("resnet10t"), "no attention of tokens is found"),
    "positions behind the first block": (_Positioned, "add in the model takes something with a place for every token"),
    "relative positions": (
        lambda: timm.create_model("beit_base_patch16_224", depth=2, embed_dim=48, num_heads=3, img_size=32),
        "blocks.1.attn adds to scores by where tokens stand or masks them",
    ),
    "branches side by side": (lambda: timm_models.checkpoint("one layer for all").model, "other branches carry"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_every_token_is_refused_with_the_reason(name: str) -> None:
    make, reason = REFUSED[name]
    model = make().eval()
    if not isinstance(model, TracedModule):
        model = traced_model.traced(model, Architecture(name=name, family="module"))
    with pytest.raises(BadInput, match=reason):
        traced_model.with_merging(model, Merging(schedule=(1, 1)))
    assert reason in traced_model.merging_refusal(model)


@pytest.mark.parametrize(("form", "options"), [(form, each) for form, every in FORMS.items() for each in every])
def test_steps_and_layers_cut_by_cut_give_the_models_outputs(form: str, options: dict[str, Any]) -> None:
    model, images = merged(form, **options), torch.from_numpy(tiny.images(5))
    with torch.inference_mode():
        walk = StreamState.of(traced_model.embedded(model, images), None)
        for step in traced_model.steps(model):
            walk = walk.behind(step)
        (given,) = traced_model.answers(model, walk, images)
        pieces, layers = layered(model)
        torch.testing.assert_close(given, outputs(model), rtol=0, atol=0)
        torch.testing.assert_close(pieces(images), outputs(model), rtol=0, atol=0)
    assert [step.name for step in traced_model.steps(model) if isinstance(step, Merge)] == [
        "blocks.0.merge",
        "blocks.1.merge",
    ]
    assert {f"blocks.{block}.mlp.fc1" for block in range(2)} <= {layer.name for layer in layers}


def _transformers(directory: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTMSNConfig(**sizes, image_size=32, patch_size=8, num_labels=5)
    torch.manual_seed(0)
    model = transformers.ViTMSNForImageClassification(config).eval()
    tiny.enliven(model, 0)
    model.save_pretrained(directory)


@pytest.mark.slow("graph")
def test_commands_merge_in_a_vit_of_transformers(tmp_path: Path) -> None:
    _transformers(tmp_path / "hf")
    np.save(tmp_path / "images.npy", tiny.images(48))
    np.save(tmp_path / "held-out.npy", tiny.images(16, seed=5))
    model, asked = ("--model", f"hf:{tmp_path / 'hf'}"), ("--merge-tokens", 3)
    moments, reduced, graph, record = (tmp_path / each for each in ("moments.st", "reduced", "m.onnx", "parity.json"))
    invoked("calibrate", *model, "--images", tmp_path / "images.npy", *asked, "-o", moments)
    invoked("reduce", *model, "--moments", moments, *asked, "--mlp", 0.5, "--align", "mlp=8,head=8", "-o", reduced)
    said = json.loads(invoked("inspect", "--model", reduced, "--json").stdout)
    assert said["merging"]["tokens"] == [17, 14, 11]
    invoked("export", "--model", reduced, "-o", graph)
    held_out = ("--images", tmp_path / "held-out.npy", "--batch", "1,5", "--max-error", 2.0, "--min-agreement", 0.0)
    invoked("verify", *model[1:], reduced, graph, *held_out, "-o", record)
    assert {link["status"] for link in json.loads(record.read_text())["links"]} == {"PASS"}
