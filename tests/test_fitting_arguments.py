"""Arguments that weights show: what is suggested where a model doesn't fit makes one that does."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.layers import SwiGLU, SwiGLUPacked
from torch import Tensor

from corp_deploy.families.timm_vit_arguments import Fitting, fitting_arguments
from corp_deploy.store.dense_model import load_dense
from ground.errors import BadInput
from tests.refusals import rejects

NAME = "vit_tiny_patch16_224"
SMALL: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": 1, "num_heads": 3, "num_classes": 5}


def built(name: str = NAME, **arguments: Any) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = timm.create_model(name, **arguments)
    return model


def suggested(state: Mapping[str, Tensor], **given: Any) -> Fitting:
    found = fitting_arguments(built(**given), NAME, state, given)
    assert found is not None
    return found


DIFFERENT: dict[str, dict[str, Any]] = {
    "another size of everything": {},
    "LayerScale": {"init_values": 1e-5},
    "registers": {"reg_tokens": 4},
    "registers without positions": {"reg_tokens": 4, "no_embed_class": True},
    "no classifier": {"num_classes": 0},
    "one channel": {"in_chans": 1},
    "norms of queries and keys": {"qk_norm": True},
    "no biases of queries": {"qkv_bias": False},
    "a norm in front": {"pre_norm": True},
    "no class token": {"class_token": False, "global_pool": "avg"},
    "average pooling": {"global_pool": "avg"},
    "pooling by attention": {"class_token": False, "global_pool": "map"},
    "a wide MLP": {"mlp_ratio": 6.0},
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_suggested_arguments_build_the_weights_model(kind: str) -> None:
    arguments = {**SMALL, **DIFFERENT[kind]}
    state = built(**arguments).state_dict()
    found = suggested(state)
    shapes = {name: each.shape for name, each in built(**found.arguments).state_dict().items()}
    assert shapes == {name: each.shape for name, each in state.items()}
    for name in ("img_size", "patch_size", "embed_dim", "depth"):
        assert found.arguments[name] == SMALL[name]
    assert suggested(state, **SMALL).arguments.keys() <= {*SMALL, *DIFFERENT[kind]}


def test_gated_mlp_is_suggested_in_our_spelling() -> None:
    gated = {"mlp_layer": SwiGLUPacked, "act_layer": torch.nn.SiLU, "init_values": 1e-5, "num_classes": 0}
    found = suggested(built(**{**SMALL, **gated}).state_dict())
    assert found.arguments["mlp_layer"] == "swiglu_packed"
    assert found.arguments["act_layer"] == "silu"
    assert found.arguments["num_heads"] == 3
    assert found.assumed[-1] == "act_layer silu (weights don't tell the activation)"
    plain = suggested(built(**{**SMALL, **gated, "mlp_layer": SwiGLU}).state_dict())
    assert plain.arguments["mlp_layer"] == "swiglu"


@pytest.mark.parametrize("spelling", ["swiglu_packed", "SwiGLUPacked", "timm.layers.SwiGLUPacked", "swigluPacked"])
def test_gated_mlp_accepts_timms_spelling(spelling: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    arguments = {**SMALL, "act_layer": "silu"}
    state = timm.create_model(NAME, **{**arguments, "mlp_layer": SwiGLUPacked}).state_dict()
    torch.save(state, tmp_path / "w.pth")
    loaded = load_dense(NAME, weights=tmp_path / "w.pth", kwargs={**arguments, "mlp_layer": spelling})
    assert torch.equal(loaded.model.state_dict()["blocks.0.mlp.fc2.weight"], state["blocks.0.mlp.fc2.weight"])


def test_head_count_is_the_given_or_usual_one() -> None:
    wide = built(embed_dim=384, depth=1, num_heads=6).state_dict()
    assert suggested(wide).arguments["num_heads"] == 6
    assert suggested(wide, num_heads=4, embed_dim=64).arguments["num_heads"] == 4
    assert suggested(wide).assumed == ["num_heads 6 (heads of 64; weights don't tell how many)"]
    normed = built(embed_dim=384, depth=1, num_heads=12, qk_norm=True).state_dict()
    assert suggested(normed).arguments["num_heads"] == 12


def test_contradicted_arguments_are_omitted() -> None:
    state = built(**SMALL).state_dict()
    found = suggested(state, **SMALL, init_values=1e-5, reg_tokens=2, mlp_layer=None)
    assert built(**found.arguments).state_dict().keys() == state.keys()


def test_only_fitting_arguments_are_suggested() -> None:
    state = built(**SMALL).state_dict()
    assert fitting_arguments(built(), NAME, {**state, "more.weight": torch.ones(1)}, {}) is None
    assert fitting_arguments(built("resnet18"), "resnet18", state, {}) is None
    assert fitting_arguments(built(), NAME, {"a": torch.ones(1)}, {}) is None


@pytest.mark.parametrize("classes", [0, 5])
def test_suggested_arguments_load_the_weights(classes: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    arguments = {**SMALL, "init_values": 0.1, "reg_tokens": 4, "num_classes": classes}
    state = timm.create_model(NAME, **arguments).state_dict()
    torch.save({"student": {f"net.{name}": each for name, each in state.items()}}, tmp_path / "w.pth")
    with pytest.raises(BadInput, match=r"renamed .* tensors, net\.cls_token as cls_token") as refusal:
        load_dense(NAME, weights=tmp_path / "w.pth", kwargs={})
    arguments = json.loads(str(refusal.value).split("--model-kwargs '")[1].split("'")[0])
    loaded = load_dense(NAME, weights=tmp_path / "w.pth", kwargs=arguments)
    assert loaded.model.state_dict().keys() == state.keys()


ADAPTERS = {
    "loralib": ("{}.lora_A", r"a LoRA adapter.*with loralib model\.eval\(\)"),
    "PEFT": ("{}.lora_A.default.weight", r"a LoRA adapter.*merge_and_unload\(\)"),
    "IA3": ("{}.ia3_l.default", r"an adapter of PEFT.*merge_and_unload\(\)"),
    "a parametrization": ("{}.parametrizations.weight.original", r"a parametrization of torch.*remove_parametriz"),
    "8 bits": ("{}.SCB", "quantised layers.*before quantisation"),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_are_named_with_merge_instructions(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    name, said = ADAPTERS[kind]
    state = timm.create_model(NAME, **SMALL).state_dict()
    torch.save({**state, name.format("blocks.0.attn.qkv"): torch.ones(4, 96)}, tmp_path / "w.pth")
    rejects(said, load_dense, NAME, weights=tmp_path / "w.pth", kwargs=SMALL)


SWIN = {"img_size": 56, "depths": [1, 1], "num_heads": [1, 2], "embed_dim": 16}
HEADS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "Swin as timm has it": ("swin_tiny_patch4_window7_224", SWIN, {}),
    "Swin as Microsoft and older timm have it": (
        "swin_tiny_patch4_window7_224",
        SWIN,
        {"layers.1.downsample": "layers.0.downsample", "head.fc.": "head."},
    ),
    "ConvNeXt as its authors have it": (
        "convnext_atto",
        {"depths": [1, 1, 1, 1], "dims": [8, 8, 8, 8], "conv_mlp": False},
        {"head.fc.": "head.", "head.norm.": "norm."},
    ),
    "a classifier that is a convolution": ("resnetv2_50", {"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8]}, {}),
}


@pytest.mark.parametrize("kind", HEADS)
def test_class_count_is_read_from_renamed_heads(kind: str, tmp_path: Path) -> None:
    name, arguments, older = HEADS[kind]
    torch.manual_seed(0)
    state = dict(timm.create_model(name, **arguments, num_classes=5).state_dict())
    for new, old in older.items():
        state = {key.replace(new, old): each for key, each in state.items()}
    torch.save({"model": state}, tmp_path / "w.pth")
    loaded = load_dense(name, weights=tmp_path / "w.pth", kwargs=arguments)
    assert loaded.architecture.kwargs["num_classes"] == 5
    assert f"w.pth: tells 5 classes apart, where {name} has 1000: built with 5" in loaded.notes
