"""torchvision's VisionTransformer and SwinTransformer, read as timm's: the same outputs, images prepared alike."""

from math import floor
from pathlib import Path
from typing import Any

import pytest
import torch

from corp_deploy.families.family import image_spec, sites_of
from corp_deploy.families.preprocessing import Preprocessing
from corp_deploy.store.dense_model import load_dense
from ground.errors import BadInput
from tests import tiny

torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed, so there are no models of it")

VIT: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 3, "mlp_ratio": 2.0, "patch_size": 8}
SWIN: dict[str, Any] = {"embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4, "img_size": 64}


def vit(size: int = 32) -> Any:
    return torchvision.models.VisionTransformer(
        image_size=size, patch_size=8, num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=96, num_classes=5
    )


def swin() -> Any:
    return torchvision.models.SwinTransformer(
        patch_size=[4, 4], embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=5
    )


def swin_v2() -> Any:
    return torchvision.models.SwinTransformer(
        patch_size=[4, 4],
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        num_classes=5,
        block=torchvision.models.swin_transformer.SwinTransformerBlockV2,
        downsample_layer=torchvision.models.swin_transformer.PatchMergingV2,
    )


MODELS: dict[str, Any] = {"swin_t": swin, "swin_v2_t": swin_v2}


def lively(model: Any) -> Any:
    torch.manual_seed(0)
    tiny.enliven(model, 0)
    return model.eval()


@pytest.mark.parametrize(
    ("name", "kwargs", "size"),
    [("vit_b_16", VIT, 32), ("vit_b_16", VIT, 48), ("swin_t", SWIN, 64), ("swin_v2_t", SWIN, 64)],
)
def test_the_model_is_torchvisions(name: str, kwargs: dict[str, Any], size: int, tmp_path: Path) -> None:
    theirs = lively(vit(size) if name.startswith("vit") else MODELS[name]())
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    taken = load_dense(f"torchvision:{name}", weights=tmp_path / "w.pth", kwargs=kwargs)
    images = torch.from_numpy(tiny.images(3, size=size))
    with torch.inference_mode():
        torch.testing.assert_close(taken.model(images), theirs(images), rtol=1e-4, atol=1e-4)
    assert image_spec(taken.model).shape == (3, size, size)
    assert image_spec(taken.model).as_json()["mean"] == [0.485, 0.456, 0.406]
    assert any("read as timm's" in note for note in taken.notes)
    assert any("tells 5 classes apart" in note for note in taken.notes)
    assert len(sites_of(taken.model).every) == (4 if name.startswith("vit") else 8)


@pytest.mark.parametrize(
    "name", ["vit_b_16", "vit_b_32", "vit_l_16", "swin_t", "swin_s", "swin_b", "swin_v2_t", "swin_v2_s", "swin_v2_b"]
)
def test_images_are_prepared_as_torchvision_does(name: str) -> None:
    from corp_deploy.families.torchvision_names import TWINS, preprocessing_of

    theirs = torchvision.models.get_model_weights(name).IMAGENET1K_V1.transforms()
    ours = preprocessing_of(TWINS[name], 224 if name.startswith("vit") else None)
    assert ours.mean == tuple(theirs.mean)
    assert ours.std == tuple(theirs.std)
    assert ours.interpolation == theirs.interpolation.value
    assert floor(theirs.crop_size[0] / (ours.crop_pct or 1.0)) == theirs.resize_size[0], "as timm computes it"


def test_what_is_no_model_or_weights_of_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="alexnet needs --weights"):
        load_dense("torchvision:alexnet", weights=None, kwargs={})
    with pytest.raises(BadInput, match=r"or one of resnet50\.IMAGENET1K_V1, resnet50\.IMAGENET1K_V2"):
        load_dense("torchvision:resnet50.IMAGENET1K_V3", weights=None, kwargs={})
    with pytest.raises(BadInput, match="needs --weights"):
        load_dense("torchvision:vit_b_16", weights=None, kwargs={})
    torch.save(tiny.checkpoint().model.state_dict(), tmp_path / "w.pth")
    with pytest.raises(BadInput, match="no names of torchvision's weights"):
        load_dense("torchvision:vit_b_16", weights=tmp_path / "w.pth", kwargs=VIT)


def test_what_torchvision_does_to_colours_is_not_done_to_other_channels(tmp_path: Path) -> None:
    theirs = vit()
    theirs.conv_proj = torch.nn.Conv2d(1, 48, 8, stride=8)
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    grey = {**VIT, "in_chans": 1}
    spec = image_spec(load_dense("torchvision:vit_b_16", weights=tmp_path / "w.pth", kwargs=grey).model)
    assert spec.shape == (1, 32, 32)
    assert not {"mean", "std"} & spec.as_json().keys()
    given = Preprocessing(mean=(0.1,), std=(0.3,))
    taken = load_dense("torchvision:vit_b_16", weights=tmp_path / "w.pth", kwargs=grey, preprocessing=given)
    assert image_spec(taken.model).as_json()["std"] == [0.3]
    rgb = Preprocessing(mean=(0.1, 0.2, 0.3))
    with pytest.raises(BadInput, match="mean has 3 numbers, expected 1"):
        load_dense("torchvision:vit_b_16", weights=tmp_path / "w.pth", kwargs=grey, preprocessing=rgb)
