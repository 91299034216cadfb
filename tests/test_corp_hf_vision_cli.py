"""Vision models of transformers through the commands, from a directory or a recipe to a saved directory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corp_deploy import load
from corp_deploy.release.recipe_file import load_recipe
from corp_deploy.release.recipe_toml import text_of_recipe
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.model_config import load_model_config
from corp_deploy.store.transformers_saved import refuse_unsayable
from tests import hf_towers, tiny
from tests.command import invoked, refuses
from tests.recipes import recipe
from tests.refusals import rejects

transformers = pytest.importorskip("transformers", reason="transformers is not installed, so there are no models of it")


def calibrated(home: Path, name: str, **changes: Any) -> tuple[str, ...]:
    """Write a tower, images and moments, and return the options that name them."""
    hf_towers.write_tower(home / "hf", name, **changes)
    config = json.loads((home / "hf" / "config.json").read_text())
    (home / "hf" / "config.json").write_text(json.dumps(config | {"torch_dtype": "float16"}))
    np.save(home / "images.npy", tiny.images(48))
    np.save(home / "held-out.npy", tiny.images(16, seed=5))
    model = ("--model", f"hf:{home / 'hf'}")
    result = invoked("calibrate", *model, "--images", home / "images.npy", "-o", home / "moments.safetensors")
    assert f"{hf_towers.sites_in(name)} sites" in result.output
    return (*model, "--moments", str(home / "moments.safetensors"), "--align", "mlp=8,head=8")


@pytest.mark.slow("graph")
@pytest.mark.parametrize(
    ("name", "role", "options"),
    [
        ("Dinov2ForImageClassification", "logits", ("--mlp", 0.5, "--attn", 0.5)),
        ("CLIPVisionModelWithProjection", "embedding", ("--mlp", 0.5, "--attn", 0.5, "--closed-loop")),
        ("SiglipVisionModel", "embedding", ("--macs", 0.8)),
    ],
)
def test_tower_is_exported_from_its_directory(tmp_path: Path, name: str, role: str, options: Any) -> None:
    reduce = ("reduce", *calibrated(tmp_path, name))
    shown = json.loads(invoked("inspect", "--model", f"hf:{tmp_path / 'hf'}", "--json").stdout)
    assert shown["weights"]["class"] == name
    images = () if len(options) == 4 else ("--images", tmp_path / "images.npy")
    directory, graph, record = (tmp_path / each for each in ("reduced", "model.onnx", "parity.json"))
    invoked(*reduce, *options, *images, "-o", directory)
    invoked("export", "--model", directory, "-o", graph)
    held_out = ("--images", tmp_path / "held-out.npy", "--batch", "1,5", "--max-error", 2.0)
    loose = ("--min-agreement", 0.0) if role == "logits" else ()
    invoked("verify", directory, directory, graph, *held_out, *loose, "-o", record)
    links = json.loads(record.read_text())["links"]
    assert {link.get("role", "logits") for link in links} == {role}
    assert {link["status"] for link in links} == {"PASS"}, links


@pytest.mark.slow("models")
@pytest.mark.parametrize(
    ("name", "options", "expected_config"),
    [
        ("ViTModel", ("--mlp", 0.5, "--attn", 0.5), {"intermediate_size": 40, "head_dim": 8}),
        ("DeiTForImageClassificationWithTeacher", ("--mlp", 0.3, "--attn", 0.5), {"head_dim": 8}),
        ("Dinov2ForImageClassification", ("--mlp", 0.5, "--attn", 0.5), {"mlp_ratio": 1, "head_dim": 8}),
        ("Dinov2WithRegistersModel", ("--attn", 0.5), {"mlp_ratio": 2, "head_dim": 8}),
        ("CLIPVisionModelWithProjection", ("--mlp", 0.5), {"intermediate_size": 40}),
        ("DINOv3ViTModel", ("--mlp", 0.5), {"intermediate_size": 40, "query_bias": True}),
        ("DINOv3ViTModel", ("--mlp", 0.5), {"intermediate_size": 40, "use_gated_mlp": True}),
        ("SiglipVisionModel", ("--mlp", 0.5), {"intermediate_size": 40}),
    ],
)
def test_reduced_model_loads_in_transformers(
    tmp_path: Path, name: str, options: tuple[Any, ...], expected_config: dict[str, int]
) -> None:
    changes: dict[str, Any] = {"num_channels": 3}
    changes |= {"use_gated_mlp": True, "hidden_act": "silu"} if "use_gated_mlp" in expected_config else {}
    square = ("--heads", "square") if "--attn" in options else ()
    words = (*calibrated(tmp_path, name, **changes), *options, *square, "--save-as", "hf", "-o", tmp_path / "reduced")
    invoked("reduce", *words)
    saved = tmp_path / "reduced" / "hf"
    config = json.loads((saved / "config.json").read_text())
    assert expected_config.items() <= config.items()
    assert (config["dtype"], "torch_dtype" in config) == ("float32", False)
    theirs = hf_towers.load_by_transformers(saved, name)
    images = torch.from_numpy(tiny.images(4, seed=9))
    with torch.inference_mode():
        expected = hf_towers.output_of(name, theirs, images)
    ours = tiny.ran(load(tmp_path / "reduced"), images)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    automatic: Any = transformers.AutoModel
    assert type(automatic.from_pretrained(saved)).__name__.startswith(name[:4])


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("ViTModel", ("--attn", 0.5), "layers.0.attention has queries and keys of 8 and values of 16, expected one"),
        ("ViTModel", ("--macs", 0.8), "a budget gives every layer widths of its own"),
        ("ViTModel", ("--mlp", 0.5, "--merge-tokens", 2), "no class of transformers merges tokens"),
        ("ViTModel", ("--attn", 0.5, "--heads", "auto"), "give --heads square"),
        (
            "CLIPVisionModel",
            ("--attn", 0.5, "--heads", "square"),
            "self_attn.qk is 16 wide of 32, and CLIPVisionModel has no entry for that",
        ),
        ("Dinov2Model", ("--mlp", 0.25), "layer.0.mlp is 48 wide, and dinov2's mlp_ratio is whole: multiples of 32"),
    ],
)
def test_widths_no_configuration_can_express_are_refused_before_any_work(
    tmp_path: Path, name: str, options: tuple[Any, ...], words: str
) -> None:
    hf_towers.write_tower(tmp_path / "hf", name)
    (tmp_path / "moments.safetensors").write_bytes(b"never read")
    np.save(tmp_path / "images.npy", tiny.images(8))
    images = ("--images", tmp_path / "images.npy") if {"--macs", "auto"} & {*map(str, options)} else ()
    model = (
        "--model",
        f"hf:{tmp_path / 'hf'}",
        "--moments",
        tmp_path / "moments.safetensors",
        "--align",
        "mlp=8,head=8",
    )
    command = ("reduce", *model, *options, *images, "--save-as", "hf", "-o", tmp_path / "reduced")
    message = " ".join(invoked(*command, code=2).stderr.split())
    assert words in message
    assert "corp_deploy.load reads the directory" in message
    assert not (tmp_path / "reduced").exists()


def test_ragged_widths_and_other_models_are_refused(tmp_path: Path) -> None:
    hf_towers.write_tower(tmp_path, "ViTModel")
    dense = load_dense(f"hf:{tmp_path}", weights=None, kwargs={})
    first, second = ({"layers.0.mlp": 40, "layers.1.mlp": width} for width in (40, 32))
    refuse_unsayable(dense, first)
    rejects("layers.1.mlp is 32 wide and layers.0.mlp 40, and a configuration", refuse_unsayable, dense, second)
    heads = {f"layers.{block}.attention.{part}": 16 for block in (0, 1) for part in ("qk", "v")}
    refuse_unsayable(dense, heads)
    ragged = heads | {f"layers.1.attention.{part}": 24 for part in ("qk", "v")}
    rejects("layers.1.attention has heads of 12 and layers.0.attention of 8", refuse_unsayable, dense, ragged)
    rejects("expected one read by --model hf:DIR", refuse_unsayable, tiny.checkpoint(), {})


SHARES = {"mlp": 0.5, "attn": 0.5, "heads": "square", "align_mlp": 8, "align_head": 8, "save_as": "hf"}
RECIPE = recipe({"model": {"model": "hf:source"}, "calibration": {"images": "images.npy"}, "reduce": SHARES})


def test_recipe_reads_and_writes_a_transformers_directory(tmp_path: Path) -> None:
    names = dict(enumerate(["ant", "bee", "cat", "dog", "elk"]))
    hf_towers.write_tower(tmp_path / "source", "ViTForImageClassification", qkv_bias=True, id2label=names)
    np.save(tmp_path / "images.npy", tiny.images(24))
    np.save(tmp_path / "held-out.npy", tiny.images(8, seed=5))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    read = load_recipe(tmp_path / "recipe.toml")
    (tmp_path / "resolved.toml").write_text(text_of_recipe(read, tmp_path))
    assert load_recipe(tmp_path / "resolved.toml") == read
    stages = [word for name in ("recipe", "dense", "moments", "reduce") for word in ("--only", name)]
    invoked("release", tmp_path / "recipe.toml", "-o", tmp_path / "out", *stages)
    saved = hf_towers.load_by_transformers(tmp_path / "out" / "reduced" / "hf", "ViTForImageClassification")
    assert (saved.config.intermediate_size, saved.config.head_dim) == (40, 8)
    own = load_model_config(tmp_path / "out" / "reduced")
    assert own.lineage["class_names"] == [*names.values()]
    assert own.architecture_line == "ViTForImageClassification"
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps(config | {"model_type": "bert", "vocab_size": 9}))
    words = ("release", tmp_path / "recipe.toml", "-o", tmp_path / "out", "--dry-run")
    refuses("model_type is 'bert', a model of texts, expected one of images", *words)


def _contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_source_is_not_replaced_and_no_stale_model_remains(tmp_path: Path) -> None:
    reduce, written = ("reduce", *calibrated(tmp_path, "ViTModel", num_channels=3)), tmp_path / "reduced"
    before = _contents(tmp_path)
    for words in (("-o", tmp_path / "hf"), ("--save-as", "hf", "-o", tmp_path)):
        refuses("would replace what it is made from", *reduce, "--mlp", 0.5, *words)
    assert _contents(tmp_path) == before
    invoked(*reduce, "--mlp", 0.5, "--save-as", "hf", "-o", written)
    before = _contents(tmp_path)
    refuses("would remain beside this one", *reduce, "--mlp", 0.3, "-o", written)
    assert _contents(tmp_path) == before
    invoked(*reduce, "--mlp", 0.3, "--save-as", "hf", "-o", written)
    assert json.loads((written / "hf" / "config.json").read_text())["intermediate_size"] == 56
