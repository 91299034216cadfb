"""Checkpoints as people have them: every container, wrapper and shard gives the same tensors, and no code runs."""

import argparse
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

from corp_deploy.store.checkpoint import load_checkpoint
from corp_deploy.store.checkpoint import save as save_checkpoint
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.weights import read_weights
from tests import tiny
from tests.refusals import rejects


class Canary:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


NAME, KWARGS = tiny.ARCHITECTURE.name, tiny.ARCHITECTURE.kwargs
STATE = tiny.checkpoint().model.state_dict()
AVERAGE = {name: tensor + 1.0 for name, tensor in STATE.items()}


def loaded(path: Path, **kwargs: Any) -> dict[str, torch.Tensor]:
    return load_dense(NAME, weights=path, kwargs=KWARGS, **kwargs).model.state_dict()


def filtered(state: Mapping[str, torch.Tensor], model: torch.nn.Module, **how: Any) -> dict[str, torch.Tensor]:
    """What timm's own filter makes of a state dict."""
    assert isinstance(model, VisionTransformer)
    return checkpoint_filter_fn(dict(state), model, **how)


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)


def prefixed(prefix: str, state: Mapping[str, torch.Tensor] = STATE) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor.clone() for name, tensor in state.items()}


CONTAINERS: dict[str, tuple[str, Any]] = {
    "a trainer's file": (
        "model_best.pth.tar",
        {"epoch": 3, "args": argparse.Namespace(lr=0.1, model=NAME), "state_dict": prefixed("module.")},
    ),
    "pytorch_model.bin": ("pytorch_model.bin", STATE),
    "Lightning": ("last.ckpt", {"state_dict": prefixed("model."), "hyper_parameters": {"lr": 0.1}}),
    "compiled and distributed": ("w.pt", prefixed("_orig_mod.module.")),
    "distributed and compiled": ("w.pth", {"model": prefixed("module._orig_mod.model.")}),
    "Hugging Face's wrapper": ("wrapped.pth", prefixed("timm_model.module.")),
    "safetensors": ("w.safetensors", prefixed("_orig_mod.model.")),
    "a compiled block": (
        "blocks.pth",
        {name.replace("blocks.0.", "blocks.0._orig_mod."): tensor for name, tensor in STATE.items()},
    ),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_container_gives_equal_tensors(kind: str, tmp_path: Path) -> None:
    name, content = CONTAINERS[kind]
    write: Callable[[Any, Path], object] = save_file if name.endswith(".safetensors") else torch.save
    write(content, tmp_path / name)
    same(read_weights(tmp_path / name, STATE).state, STATE)
    same(loaded(tmp_path / name), STATE)


AVERAGED = [
    ("state_dict", "state_dict_ema"),
    ("model", "model_ema"),
    ("model", "ema"),
    ("net", "ema_state_dict"),
    ("params", "params_ema"),
    ("model_state_dict", "averaged_model"),
    ("network", "shadow"),
    ("weights", "swa_state_dict"),
]


@pytest.mark.parametrize(("raw", "average"), AVERAGED)
def test_moving_average_weights_are_preferred_and_reported(raw: str, average: str, tmp_path: Path) -> None:
    path = tmp_path / "last.pth.tar"
    torch.save({raw: STATE, average: AVERAGE, "epoch": 3}, path)
    taken = load_dense(NAME, weights=path, kwargs=KWARGS)
    same(taken.model.state_dict(), AVERAGE)
    assert taken.notes == (f"last.pth.tar: took {average}, the moving average of the weights; --no-ema takes {raw}",)
    assert taken.lineage["source"]["taken"] == average
    same(loaded(path, ema=True), AVERAGE)
    same(loaded(path, ema=False), STATE)
    assert read_weights(path, ema=False).notes == (f"last.pth.tar: took {raw}, not the moving average {average}",)


def test_moving_average_alone_or_absent_is_handled(tmp_path: Path) -> None:
    path = tmp_path / "ema.pth"
    torch.save({"state_dict_ema": AVERAGE}, path)
    same(loaded(path), AVERAGE)
    rejects("holds state_dict_ema alone", read_weights, path, ema=False)
    torch.save({"state_dict": STATE, "state_dict_ema": None}, path)
    same(loaded(path, ema=False), STATE)
    rejects("--ema, but nothing in it is called a moving average.* it holds state_dict;", read_weights, path, ema=True)


def sharded(folder: Path, state: Mapping[str, torch.Tensor]) -> Path:
    names = sorted(state)
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    halves = (names[::2], names[1::2])
    for file, half in zip(files, halves, strict=True):
        save_file({name: state[name].clone() for name in half}, folder / file)
    weight_map = {name: file for file, half in zip(files, halves, strict=True) for name in half}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_shards_are_joined(tmp_path: Path) -> None:
    index = sharded(tmp_path, prefixed("module."))
    same(loaded(index), STATE)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    rejects(r"model-00002-of-00002\.safetensors: no such file", read_weights, index)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"weight_map": {"a": "../w.safetensors"}}, "no file name beside"),
        ({"weight_map": {"a": "/etc/w.safetensors"}}, "no file name beside"),
        ({"weight_map": {"a": "model.safetensors.index.json"}}, "no file name beside"),
        ({"weight_map": {"a": 3}}, r"weight_map\[...\]: got a whole number, expected a text"),
        ({"weight_map": ["a"]}, "expected an index"),
        ({}, "expected an index"),
        ({"weight_map": {"norm.absent": "w.safetensors"}}, r"w\.safetensors: no norm\.absent"),
    ],
)
def test_invalid_index_is_refused(content: Mapping[str, Any], said: str, tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "w.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(content))
    rejects(said, read_weights, index)


def test_position_embeddings_are_resampled_like_timms(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "w.safetensors")
    larger = {**KWARGS, "img_size": 48}
    taken = load_dense(NAME, weights=tmp_path / "w.safetensors", kwargs=larger)
    expected = filtered(STATE, timm.create_model(NAME, **larger))
    assert expected["pos_embed"].shape == (1, 37, 48)
    same(taken.model.state_dict(), expected)
    assert taken.notes == ("w.safetensors: pos_embed resampled by timm from 1x17x48 to 1x37x48",)


def test_old_deit_iii_names_are_mapped(tmp_path: Path) -> None:
    kwargs = {**KWARGS, "init_values": 0.1}
    state = tiny.checkpoint(init_values=0.1, no_embed_class=True).model.state_dict()
    official = {
        name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): tensor for name, tensor in state.items()
    }
    torch.save({"model": official}, tmp_path / "deit_3.pth")
    taken = load_dense("deit3_small_patch16_224", weights=tmp_path / "deit_3.pth", kwargs=kwargs)
    same(taken.model.state_dict(), state)
    (note,) = taken.notes
    assert "names mapped by timm to blocks.0.ls1.gamma, blocks.0.ls2.gamma" in note


def test_official_dinov2_with_registers_loads(tmp_path: Path) -> None:
    kwargs = {**KWARGS, "reg_tokens": 4, "no_embed_class": True, "num_classes": 0, "global_pool": "token"}
    state = dict(tiny.checkpoint(**{key: kwargs[key] for key in kwargs if key not in KWARGS}).model.state_dict())
    state = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
    first = torch.randn(1, 1, 48, generator=torch.Generator().manual_seed(5))
    official = dict(state) | {"mask_token": torch.zeros(1, 48), "register_tokens": state["reg_token"]}
    official |= {"cls_token": state["cls_token"] - first, "pos_embed": torch.cat([first, state["pos_embed"]], 1)}
    del official["reg_token"]
    torch.save(official, tmp_path / "dinov2.pth")
    taken = load_dense(NAME, weights=tmp_path / "dinov2.pth", kwargs=kwargs)
    torch.testing.assert_close(dict(taken.model.state_dict()), state)
    assert any("not used: mask_token" in note for note in taken.notes)


def test_classifier_weights_are_dropped_only_for_a_model_without_one(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "w.safetensors")
    taken = load_dense(NAME, weights=tmp_path / "w.safetensors", kwargs={**KWARGS, "num_classes": 0})
    same(taken.model.state_dict(), {name: tensor for name, tensor in STATE.items() if not name.startswith("head.")})
    assert taken.notes == ("w.safetensors: not used, as the model was built without: head.bias, head.weight",)
    printed, five = json.dumps({**KWARGS, "num_classes": 7}), {**KWARGS, "num_classes": 5}
    said = re.escape(f"give --model-kwargs '{printed}'")
    rejects(said, load_dense, NAME, weights=tmp_path / "w.safetensors", kwargs=five)
    load_dense(NAME, weights=tmp_path / "w.safetensors", kwargs=json.loads(printed))


def test_classifier_of_other_classes_is_used_if_classes_are_unset(tmp_path: Path) -> None:
    """A whole checkpoint of a fine-tuning: averaged, of another image size, sharded and wrapped, of 7 classes."""
    kwargs = {key: value for key, value in KWARGS.items() if key != "num_classes"}
    taken = load_dense(NAME, weights=sharded(tmp_path, prefixed("module.")), kwargs=kwargs)
    same(taken.model.state_dict(), STATE)
    assert taken.notes == (
        "model.safetensors.index.json: renamed 32 tensors, module.blocks.0.attn.proj.bias as blocks.0.attn.proj.bias",
        "model.safetensors.index.json: tells 7 classes apart, where " + NAME + " has 1000: built with 7",
    )
    assert taken.architecture.kwargs["num_classes"] == 7
    save_checkpoint(taken, tmp_path / "model")
    same(load_checkpoint(tmp_path / "model").model.state_dict(), STATE)
    torch.save({"state_dict": STATE, "state_dict_ema": prefixed("module.", AVERAGE)}, tmp_path / "last.pth.tar")
    larger = load_dense(NAME, weights=tmp_path / "last.pth.tar", kwargs={**kwargs, "img_size": 64})
    said = " ".join(larger.notes)
    assert "took state_dict_ema" in said
    assert "built with 7" in said
    assert "pos_embed" in said
    assert torch.equal(larger.model.state_dict()["head.weight"], AVERAGE["head.weight"])


def test_mismatched_head_or_channels_print_the_arguments_to_use(tmp_path: Path) -> None:
    bare = {name: tensor for name, tensor in STATE.items() if not name.startswith("head.")}
    save_file(bare, tmp_path / "bare.safetensors")
    rejects('"num_classes": 0', loaded, tmp_path / "bare.safetensors")
    save_file(tiny.checkpoint(in_chans=1).model.state_dict(), tmp_path / "grey.safetensors")
    rejects('"in_chans": 1', loaded, tmp_path / "grey.safetensors")


def test_non_square_position_embeddings_are_explained(tmp_path: Path) -> None:
    save_file(STATE | {"pos_embed": torch.zeros(1, 14, 48)}, tmp_path / "w.safetensors")
    said = r"pos_embed \(1, 14, 48\) instead of \(1, 17, 48\); nor can timm resample"
    rejects(said, loaded, tmp_path / "w.safetensors")


FOREIGN = {
    "encoder.layers.encoder_layer_0.self_attention.in_proj_weight": "torchvision",
    "vit.encoder.layer.0.attention.attention.query.weight": "Hugging Face transformers",
    "encoder.layer.0.attention.attention.query.weight": "Hugging Face transformers",
    "vision_model.encoder.layers.0.self_attn.q_proj.weight": "Hugging Face transformers",
    "layer.0.attention.q_proj.weight": "Hugging Face transformers",
    "decoder_blocks.0.norm1.weight": "masked autoencoder",
}


@pytest.mark.parametrize("key", FOREIGN)
def test_format_of_another_library_is_named(key: str, tmp_path: Path) -> None:
    save_file({key: torch.zeros(2, 2)}, tmp_path / "w.safetensors")
    rejects(FOREIGN[key], loaded, tmp_path / "w.safetensors")


def test_openai_clip_is_mapped_without_its_text_encoder(tmp_path: Path) -> None:
    kwargs = {**KWARGS, "pre_norm": True, "norm_layer": "layernorm"}
    state = tiny.checkpoint(pre_norm=True).model.state_dict()
    swaps = (
        *(("patch_embed.proj.", "conv1."), ("blocks.", "transformer.resblocks."), ("norm_pre.", "ln_pre.")),
        *(("attn.qkv.", "attn.in_proj_"), ("attn.proj.", "attn.out_proj."), ("mlp.fc1", "mlp.c_fc")),
        *(("mlp.fc2", "mlp.c_proj"), ("norm1", "ln_1"), ("norm2", "ln_2")),
    )
    official: dict[str, torch.Tensor] = {"logit_scale": torch.ones(()), "text.x": torch.ones(2)}
    for name, tensor in state.items():
        for own, other in swaps:
            name = name.replace(own, other)
        official["visual." + ("ln_post." + name.removeprefix("norm.") if name.startswith("norm.") else name)] = tensor
    official["visual.class_embedding"] = official.pop("visual.cls_token")[0, 0]
    official["visual.positional_embedding"] = official.pop("visual.pos_embed")[0]
    official["visual.proj"] = official.pop("visual.head.weight").T.contiguous()
    del official["visual.head.bias"]
    torch.save(official, tmp_path / "clip.pt")
    taken = load_dense("vit_base_patch32_clip_224", weights=tmp_path / "clip.pt", kwargs=kwargs)
    same(taken.model.state_dict(), state | {"head.bias": torch.zeros(7)})
    assert any("not used: logit_scale, text.x" in note for note in taken.notes)


def test_flexible_models_are_resampled_bilinearly(tmp_path: Path) -> None:
    small = {key: KWARGS[key] for key in ("embed_dim", "depth", "num_heads", "num_classes")} | {"img_size": 64}
    state = timm.create_model("flexivit_small", **small).state_dict()
    save_file(state, tmp_path / "w.safetensors")
    other = {**small, "img_size": 96}
    taken = load_dense("flexivit_small", weights=tmp_path / "w.safetensors", kwargs=other).model.state_dict()
    expected = filtered(state, timm.create_model("flexivit_small", **other), interpolation="bilinear", antialias=False)
    same(taken, expected)


def test_other_checkpoint_entries_are_skipped_and_named(tmp_path: Path) -> None:
    torch.save({"state_dict": prefixed("model.") | {"loss.weight": torch.ones(2)}}, tmp_path / "last.ckpt")
    read = read_weights(tmp_path / "last.ckpt", STATE)
    same(read.state, STATE)
    assert read.notes == (
        "last.ckpt: renamed 32 tensors, model.cls_token as cls_token",
        "last.ckpt: left out tensors beside the model: loss.weight",
    )


def test_code_in_checkpoints_never_runs(tmp_path: Path) -> None:
    content = {"state_dict": STATE, "args": argparse.Namespace(hook=Canary(tmp_path / "canary"))}
    torch.save(content, tmp_path / "w.pth.tar")
    rejects(r"pickled code, which is never run \(posix\.mkdir\)", read_weights, tmp_path / "w.pth.tar")
    assert not (tmp_path / "canary").exists()
