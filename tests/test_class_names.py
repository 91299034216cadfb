"""Names of classes from configurations of transformers and timm, and the way they take to a server's labels."""

import json
from pathlib import Path
from typing import Any

import pytest

from corp_deploy.proof.report_input import shown_lineage
from corp_deploy.release.recipe_tables import ModelTable
from corp_deploy.store.class_names import class_names_in, class_names_of_lineage
from corp_deploy.store.model_config import Built, ModelConfig, ModelInput
from tests.command import invoked
from tests.export_served import config_of, write_onnx

PETS = ["cat", "dog", "hen"]
BY_INDEX = {str(index): name for index, name in enumerate(PETS)}


@pytest.mark.parametrize(
    "config",
    [
        {"id2label": BY_INDEX},
        {"id2label": dict(reversed(BY_INDEX.items()))},
        {"label_names": PETS},
        {"pretrained_cfg": {"label_names": PETS}},
        {"architecture": "vit", "labels": PETS},
        {"id2label": {"0": " cat\n", "1": "dog", "2": "hen"}},
    ],
)
def test_class_names_are_read_in_logit_order(config: dict[str, Any]) -> None:
    assert class_names_in(config, 3) == PETS


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}},
        {"id2label": {"0": "cat", "1": "dog"}},
        {"id2label": {"0": "cat", "1": "dog", "3": "hen"}},
        {"id2label": {"0": "cat", "1": "", "2": "hen"}},
        {"id2label": {"0": "cat", "1": 7, "2": "hen"}},
        {"label_names": "cat"},
        {"label_names": None, "pretrained_cfg": None},
    ],
)
def test_incomplete_class_names_are_ignored(config: dict[str, Any]) -> None:
    assert class_names_in(config, 3) == []


def test_repeated_class_names_get_their_index() -> None:
    assert class_names_in({"label_names": ["crane", "hen", "crane"]}, 3) == ["crane (0)", "hen", "crane (2)"]


def test_class_names_that_are_not_texts_are_ignored() -> None:
    assert class_names_of_lineage({"class_names": ["cat", 3]}) == ()


def results(folder: Path, names: list[str]) -> Path:
    (folder / "reduced").mkdir()
    write_onnx(folder / "reduced/model.onnx", classes=3)
    config = {"kind": "corp-deploy/model", "lineage": {"class_names": names}}
    (folder / "reduced/config.json").write_text(json.dumps(config))
    return folder


def test_repository_contains_the_models_class_names(tmp_path: Path) -> None:
    invoked("package", results(tmp_path, PETS), "-o", tmp_path / "repo")
    assert (tmp_path / "repo/vit_cpu/1/labels.txt").read_text().split() == PETS
    assert config_of(tmp_path / "repo/vit_cpu").inner("output").text("label_filename") == "1/labels.txt"


def test_explicit_labels_override_the_models_names(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("a\nb\nc\n")
    invoked("package", results(tmp_path, PETS), "-o", tmp_path / "repo", "--labels", tmp_path / "names.txt")
    assert (tmp_path / "repo/vit_cpu/1/labels.txt").read_text().split() == ["a", "b", "c"]


def test_class_names_of_wrong_number_are_ignored(tmp_path: Path) -> None:
    invoked("package", results(tmp_path, PETS[:2]), "-o", tmp_path / "repo")
    assert not (tmp_path / "repo/vit_cpu/1/labels.txt").exists()


# What a model card calls the model


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ({"name": "hf:/models/pets"}, "hf:pets"),
        ({"name": "/models/pets"}, "pets"),
        ({"name": "vit_tiny_patch16_224", "weights": Path("/w.safetensors")}, "vit_tiny_patch16_224"),
        ({"name": "module:/code/net.py:make"}, "module:net.py:make"),
    ],
)
def test_model_is_shown_under_its_users_name(model: dict[str, Any], shown: str) -> None:
    assert ModelTable(**model).shown == shown


def config_of_model(source: dict[str, Any]) -> ModelConfig:
    kwargs = {"img_size": [32, 32], "embed_dim": 48, "depth": 2, "norm_layer": {"eps": 1e-6}}
    lineage = {"source": source, "class_names": PETS}
    given = ModelInput(shape=(3, 32, 32), preprocessing={})
    built = Built(name="vit_base_patch16_224", kwargs=kwargs)
    return ModelConfig(timm=built, sites={}, input=given, weights_sha256="0" * 64, lineage=lineage)


def test_architecture_names_the_library_class_and_its_sizes() -> None:
    sizes = "(img_size 32x32, embed_dim 48, depth 2)"
    assert config_of_model({"class": "ViTModel"}).architecture_line == f"ViTModel {sizes}"
    assert config_of_model({}).architecture_line == f"vit_base_patch16_224 {sizes}"


def test_reports_omit_class_names_and_copied_configurations_from_the_lineage() -> None:
    config = config_of_model({"weights": "model.safetensors", "transformers": {"config": {"id2label": BY_INDEX}}})
    assert shown_lineage(config) == {"source": {"weights": "model.safetensors"}}
