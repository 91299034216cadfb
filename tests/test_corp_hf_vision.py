"""Vision models from directories of transformers: outputs, preprocessing, saving and refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from corp_deploy.families import hf_classes
from corp_deploy.families.family import image_spec, output_ports, sites_of
from corp_deploy.families.hf_encoders import OUTPUTS
from corp_deploy.families.hf_images import prepared, share_of
from corp_deploy.spec.architecture import Preprocessing
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from corp_deploy.traced.models.pairs import TracedPairs
from tests import hf_towers
from tests.refusals import rejects

transformers = pytest.importorskip("transformers", reason="transformers is not installed, so that nothing compares")


def _load(directory: Path, **kwargs: Any) -> Checkpoint:
    return load_dense(f"hf:{directory}", weights=None, kwargs=kwargs)


def _images(sides: tuple[int, int] = (32, 32), channels: int = 3) -> torch.Tensor:
    return torch.randn(3, channels, *sides, generator=torch.Generator().manual_seed(1))


def _assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.detach().abs().max()))


@pytest.mark.parametrize("name", hf_towers.TOWERS)
def test_every_class_equals_transformers(tmp_path: Path, name: str) -> None:
    theirs = hf_towers.write_tower(tmp_path, name)
    loaded = _load(tmp_path)
    images = _images(channels=theirs.config.num_channels)
    _assert_same(loaded.model(images), hf_towers.output_of(name, theirs, images))
    which = hf_towers.TOWERS[name][2]
    source = loaded.lineage["source"]
    expected = "last_hidden_state[:, 0]" if which == "class token" else which
    assert (source["class"], source.get("output", "logits")) == (name, expected)
    (port,) = output_ports(loaded.model)
    assert port.role == ("logits" if which == "logits" else "embedding")
    assert len(sites_of(loaded.model).every) == hf_towers.sites_in(name)
    assert not sites_of(loaded.model).refused


_GATED = {"use_gated_mlp": True, "hidden_act": "silu"}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Dinov2WithRegistersForImageClassification", {"use_swiglu_ffn": True}),
        ("DINOv3ViTModel", _GATED | {"key_bias": True}),
        ("DINOv3ViTModel", _GATED | {"query_bias": False, "value_bias": False}),
        ("DINOv3ViTModel", _GATED | {"query_bias": False, "num_register_tokens": 0}),
    ],
)
def test_gated_mlps_and_biases_are_read(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    theirs = hf_towers.write_tower(tmp_path, name, **changes)
    _assert_same(_load(tmp_path).model(_images()), hf_towers.output_of(name, theirs, _images()))


def test_dinov3_rotations_follow_the_image_size(tmp_path: Path) -> None:
    theirs = hf_towers.write_tower(tmp_path, "DINOv3ViTModel")
    loaded = _load(tmp_path, img_size=[48, 24])
    _assert_same(loaded.model(_images((48, 24))), theirs(_images((48, 24))).pooler_output)
    turned = [site for site in sites_of(loaded.model).every if isinstance(site, TracedPairs)]
    assert [site.repair.mixing for site in turned] == ["planes", "planes"]
    assert image_spec(loaded.model).as_json()["interpolation"] == "bilinear"


@pytest.mark.parametrize("name", ["ViTModel", "DINOv3ViTModel"])
def test_any_activation_of_transformers_is_read(tmp_path: Path, name: str) -> None:
    theirs = hf_towers.write_tower(tmp_path, name, hidden_act="mish")
    images = _images(channels=theirs.config.num_channels)
    _assert_same(_load(tmp_path).model(images), hf_towers.output_of(name, theirs, images))


def _write_whole(directory: Path, kind: str) -> Any:
    """Write CLIP or SigLIP with both towers and, as published files do, without settings that are a class's defaults.

    Return the model.
    """
    text = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**hf_towers.SMALL, "intermediate_size": 80}
    if kind == "clip":
        config: Any = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)
        model = transformers.CLIPModel(config)
    else:
        config = transformers.SiglipConfig(text_config=text | {"projection_size": 32}, vision_config=vision)
        model = transformers.SiglipModel(config)
    hf_towers.randomised(model).save_pretrained(directory)
    path = directory / "config.json"
    content = json.loads(path.read_text())
    content["vision_config"] = {key: content["vision_config"][key] for key in vision}
    path.write_text(json.dumps(content))
    return model


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_vision_tower_is_read_from_a_two_tower_model(tmp_path: Path, kind: str) -> None:
    theirs = _write_whole(tmp_path, kind)
    loaded = _load(tmp_path)
    pooled = theirs.vision_model(_images()).pooler_output
    _assert_same(loaded.model(_images()), theirs.visual_projection(pooled) if kind == "clip" else pooled)
    assert any("not used, no part of it: logit_" in note and "more" in note for note in loaded.notes)


def test_vision_tower_loads_without_its_head(tmp_path: Path) -> None:
    theirs = hf_towers.write_tower(tmp_path, "Dinov2ForImageClassification")
    _assert_same(_load(tmp_path, num_classes=0).model(_images()), theirs.dinov2(_images()).pooler_output)
    _write_whole(tmp_path / "clip", "clip")
    assert _load(tmp_path / "clip", num_classes=0).lineage["source"]["class"] == "CLIPVisionModel"


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("Dinov2Model", {}),
        ("Dinov2WithRegistersModel", {}),
        ("ViTForImageClassification", {"interpolate_pos_encoding": True}),
        ("SiglipVisionModel", {"interpolate_pos_encoding": True}),
    ],
)
def test_interpolated_positions_equal_those_of_transformers(tmp_path: Path, name: str, more: dict[str, Any]) -> None:
    theirs, sides = hf_towers.write_tower(tmp_path, name), (48, 24)
    loaded = _load(tmp_path, img_size=list(sides))
    _assert_same(loaded.model(_images(sides)), hf_towers.output_of(name, theirs, _images(sides), **more))


def test_dinov2_preprocessing_equals_its_processors(tmp_path: Path) -> None:
    theirs = hf_towers.write_tower(tmp_path, "Dinov2Model")
    processor = {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 30}, "crop_size": 24}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    loaded = _load(tmp_path)
    assert image_spec(loaded.model).shape == (3, 24, 24)
    _assert_same(loaded.model(_images((24, 24))), theirs(_images((24, 24))).pooler_output)


_PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViTModel": ("ViTImageProcessor", {"size": {"height": 32, "width": 32}}),
    "DeiTModel": ("DeiTImageProcessor", {"size": {"height": 37, "width": 37}, "crop_size": 32}),
    "Dinov2Model": (
        "BitImageProcessor",
        {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}, "image_std": [0.2, 0.3, 0.4]},
    ),
    "CLIPVisionModel": ("CLIPImageProcessor", {"size": {"shortest_edge": 32}, "crop_size": 32}),
    "SiglipVisionModel": (
        "SiglipImageProcessor",
        {"size": {"height": 32, "width": 32}, "resample": 2, "do_normalize": False},
    ),
}


@pytest.mark.parametrize("name", _PROCESSORS)
def test_preprocessing_equals_that_of_transformers(tmp_path: Path, name: str) -> None:
    """Cropping 43 rows to 32, transformers leaves 5 rows above the crop, and torchvision, which timm uses, 6."""
    hf_towers.write_tower(tmp_path, name, num_channels=3)
    kind, settings = _PROCESSORS[name]
    processor = getattr(transformers, f"{kind}Pil")(**settings)
    processor.save_pretrained(tmp_path)
    prepare = image_spec(_load(tmp_path).model).transform()
    for sides in ((60, 40), (40, 60), (32, 32), (61, 45))[: 4 if kind == "CLIPImageProcessor" else 3]:
        image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*sides, 3), dtype=np.uint8))
        ours, theirs = prepare(image), processor(images=image, return_tensors="pt").pixel_values[0]
        if sides == (61, 45):
            ours, theirs = ours[:, :-1], theirs[:, 1:]
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_command_line_preprocessing_overrides_the_directorys(tmp_path: Path) -> None:
    hf_towers.write_tower(tmp_path, "ViTModel")
    own = Preprocessing(mean=(0.25,), crop_pct=0.5)
    loaded = load_dense(f"hf:{tmp_path}", weights=None, kwargs={}, preprocessing=own)
    spec = image_spec(loaded.model).as_json()
    assert (spec["mean"], spec["std"], spec["crop_pct"]) == ([0.25] * 3, [0.5] * 3, 0.5)
    assert loaded.lineage["source"]["preprocessing"].startswith("transformers' default of vit")


@pytest.mark.parametrize("name", ["Dinov2Model", "SiglipVisionModel"])
def test_saved_directory_keeps_the_preprocessing(tmp_path: Path, name: str) -> None:
    theirs = hf_towers.write_tower(tmp_path / "hf", name)
    dense = _load(tmp_path / "hf")
    save(dense, tmp_path / "ours")
    again = load_checkpoint(tmp_path / "ours")
    images = _images(channels=theirs.config.num_channels)
    # The order of torch's sums depends on the tensors' places in memory, so that outputs differ in the last bits.
    torch.testing.assert_close(again.model(images), dense.model(images), rtol=0, atol=1e-5)
    for name, tensor in dense.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor), name
    assert image_spec(again.model).as_json() == image_spec(dense.model).as_json()
    assert output_ports(again.model) == output_ports(dense.model)


def _config(**changes: Any) -> dict[str, Any]:
    own = {"model_type": "vit", "architectures": ["ViTModel"], "hidden_size": 32, "num_attention_heads": 2}
    return own | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"auto_map": {"AutoModel": "x.y"}}, "code of its own"),
        ({"quantization_config": {}}, "quantised"),
        ({"pruned_heads": {"0": [1]}}, "heads are removed already"),
        ({"is_decoder": True}, "it is a decoder"),
        ({"position_embedding_type": "alibi"}, "position embeddings are 'alibi'"),
        ({"layer_norm_eps": "tiny"}, "not the configuration of a vit"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers.* is larger than that of any model"),
        ({"hidden_size": 10**12}, "hidden_size.* is larger than that of any model"),
        ({"architectures": ["Dinov2Model"]}, "Dinov2Model, which is no vit"),
        ({"architectures": ["os.system"]}, "no class of the installed transformers"),
        ({"model_type": "own"}, "model_type is 'own', which the installed transformers does not know"),
    ],
)
def test_models_that_would_differ_are_refused(changes: dict[str, Any], words: str) -> None:
    rejects(words, hf_classes.class_of, _config(**changes), where="config.json")


def test_siglip_without_a_pooling_head_is_refused(tmp_path: Path) -> None:
    hf_towers.write_tower(tmp_path, "SiglipVisionModel", vision_use_head=False)
    rejects("it gives no pooler_output", _load, tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"do_rescale": False}, "pixels are 0 to 255"),
        ({"do_resize": False}, "do_resize is false"),
        ({"rescale_factor": 1.0}, "rescale_factor is 1, expected 1/255"),
        ({"resample": 9}, "resample is 9"),
        (
            {"image_processor_type": "ConvNextImageProcessor"},
            "prepared by 'ConvNextImageProcessor', expected one of ViT",
        ),
        ({"size": {"longest_edge": 3}}, "not the preprocessing of a vit"),
        ({"size": {"shortest_edge": 30}}, "expected a crop of the same share"),
        ({"do_center_crop": True, "crop_size": 300}, "cropped to .300, 300."),
        ({"image_mean": "black"}, "not the preprocessing of a vit"),
    ],
)
def test_unsupported_preprocessing_is_refused(content: dict[str, Any], words: str) -> None:
    rejects(words, prepared, content, "vit", where="preprocessor_config.json")


def test_unused_processor_file_is_named(tmp_path: Path) -> None:
    config = transformers.ConvNextConfig(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], num_labels=3, image_size=32)
    transformers.ConvNextForImageClassification(config).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "ConvNextImageProcessor"}')
    loaded = _load(tmp_path)
    assert any("not used: images are prepared by 'ConvNextImageProcessor'" in note for note in loaded.notes)
    assert "mean" not in image_spec(loaded.model).as_json()


def test_missing_and_misshapen_tensors_are_refused(tmp_path: Path) -> None:
    hf_towers.write_tower(tmp_path, "ViTForImageClassification")
    path = tmp_path / "model.safetensors"
    state = {name: tensor.clone() for name, tensor in load_file(path).items()}  # the file is overwritten below
    query = "vit.encoder.layer.1.attention.attention.query.weight"
    for changed, words in (
        (
            {key: value for key, value in state.items() if key != query},
            "weights are missing or of another shape: .*layers.1.attention.q_proj",
        ),
        (state | {"classifier.weight": torch.ones(9, 32)}, "classifier.weight"),
    ):
        save_file(dict(changed), path)
        rejects(words, _load, tmp_path)


def test_timm_options_are_refused_for_a_directory(tmp_path: Path) -> None:
    hf_towers.write_tower(tmp_path, "ViTModel")
    rejects(r"--model-kwargs: .*depth.*takes img_size", _load, tmp_path, depth=3)
    rejects("drop --weights", load_dense, f"hf:{tmp_path}", weights=tmp_path / "model.safetensors", kwargs={})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "siglip2"}))
    rejects("any size .NaFlex", _load, tmp_path)


def test_crop_shares_give_exact_sizes() -> None:
    """timm divides a crop by its share and rounds down."""
    assert all(int(crop / share_of(crop, size)) == size for size in range(200, 700) for crop in (14, 198, 200))


def test_every_class_with_a_selected_output_is_compared() -> None:
    assert set(OUTPUTS) <= set(hf_towers.TOWERS)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, None),
        ({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5] * 3}, None),
        ({"image_mean": [0.1], "image_std": 0.5}, ([0.1], [0.5])),
        ({"do_normalize": False}, ([0.0], [1.0])),
    ],
)
def test_three_channel_mean_is_refused_for_a_grey_tower(tmp_path: Path, content: Any, expected: Any) -> None:
    hf_towers.write_tower(tmp_path, "ViTModel", num_channels=1)
    if content is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": 32, **content}))
    spec = image_spec(_load(tmp_path).model).as_json()
    assert ((spec["mean"], spec["std"]) if "mean" in spec else None) == expected
