"""Models without attention: ConvNeXt in its stages, MLP-Mixer over tokens and channels, ResMLP, and what is refused."""

import re
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

from calib.collect import collect
from calib.moments import ChannelMoments
from corp_deploy.families import timm_convnext
from corp_deploy.families.architecture import Architecture
from corp_deploy.families.channel_site import ChannelSite
from corp_deploy.families.family import family_of, sites_of
from corp_deploy.families.merging import Merging
from corp_deploy.families.modules import replaced
from corp_deploy.families.sites import calibration_taps
from corp_deploy.families.steps import Branch, Walk
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.closed_loop import reduce_closed_loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.read_tokens import named, tokens_to_fit
from corp_deploy.store.checkpoint import dense_from_architecture
from corp_deploy.store.dense_model import load_dense
from ground.errors import BadInput
from tests import tiny
from tests.small_models import CONVNEXT, error, opened, outputs, pixels, size_of, small

REDUCIBLE = ("convnext_tiny", "convnext_atto", "convnextv2_atto", "small_mixer", "small_gmixer", "small_resmlp")
HALF = {"mlp_sparsity": 0.5, "align_hidden": 8}


@pytest.mark.parametrize("name", [*REDUCIBLE, "small_gmlp"])
def test_the_steps_are_the_model(name: str) -> None:
    model = small(name).model
    family, images = family_of(model), pixels(model, 3)
    with torch.no_grad():
        walk = Walk.of(family.embedded(model, images), family.token_weights(model, images), merges=False)
        for step in family.steps(model):
            assert walk.tokens.x.ndim == 3
            assert len(walk.tokens.x) == 3, step
            walk = walk.behind(step)
        finished = family.finished(model, walk.tokens.x, images).double()
    torch.testing.assert_close(finished, outputs(model, images), rtol=1e-5, atol=1e-6)
    assert walk.tokens.x.shape[1] == len(family.token_kinds(model))
    assert error(family.exportable(model), model, images) < 1e-6
    branches = {step.name for step in family.steps(model) if isinstance(step, Branch)}
    assert branches >= {site.name for site in sites_of(model).every}


@pytest.mark.parametrize(
    ("name", "blocks", "hidden"),
    [
        ("convnext_atto", (2, 2, 6, 2), (160, 320, 640, 1280)),
        ("convnext_femto", (2, 2, 6, 2), (192, 384, 768, 1536)),
        ("convnext_pico", (2, 2, 6, 2), (256, 512, 1024, 2048)),
        ("convnext_nano", (2, 2, 8, 2), (320, 640, 1280, 2560)),
        ("convnext_tiny", (3, 3, 9, 3), (384, 768, 1536, 3072)),
    ],
)
def test_convnexts_of_timm_have_a_site_in_every_block(
    name: str, blocks: tuple[int, ...], hidden: tuple[int, ...]
) -> None:
    with torch.device("meta"):
        model = dense_from_architecture(Architecture(name=name))
    expected = [
        (f"stages.{stage}.blocks.{block}.mlp", width)
        for stage, (count, width) in enumerate(zip(blocks, hidden, strict=True))
        for block in range(count)
    ]
    assert [(site.name, site.width) for site in sites_of(model).every] == expected
    assert not sites_of(model).refused
    assert family_of(model).depth(model) == sum(blocks)
    assert len(list(family_of(model).steps(model))) == sum(blocks) + 3
    assert len(family_of(model).token_kinds(model)) == 7 * 7


def test_convolutions_of_a_pixel_are_linear_layers_and_the_same_function(tmp_path: Path) -> None:
    arguments = {key: value for key, value in CONVNEXT.items() if key != "img_size"}
    theirs = timm.create_model("convnext_atto", **arguments).eval()
    tiny.enliven(theirs, 0)
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    ours = load_dense("convnext_atto", weights=tmp_path / "weights.pth", kwargs={**arguments, "img_size": [32, 64]})
    assert family_of(ours.model).input_spec(ours.model).shape == (3, 32, 64)
    assert not ours.notes
    assert error(ours.model, theirs, pixels(ours.model, 2, size=64)) < 1e-6
    graphs = family_of(ours.model).exportable(ours.model)
    assert {type(module) for module in graphs.modules() if isinstance(module, nn.Linear)} == {nn.Linear}  # the head's
    assert sum(isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) for module in graphs.modules()) == 10
    assert [tuple(each.shape) for each in graphs.state_dict().values()] == [
        tuple(each.shape) for each in theirs.state_dict().values()
    ]


@pytest.mark.parametrize("name", REDUCIBLE)
def test_full_width_is_the_dense_model_at_two_sizes(name: str, tmp_path: Path) -> None:
    """A Mixer takes one size; a ConvNeXt is calibrated at one and run at another as well."""
    checkpoint = small(name)
    model = checkpoint.model
    moments = calibrate(checkpoint, opened(model, 16, tmp_path), batch_size=8)
    whole = reduce(model, moments, method_from_preset("best", mlp_sparsity=0.0)).model
    for size in (size_of(model), 96) if name.startswith("convnext") else (size_of(model),):
        assert error(whole, model, pixels(model, 4, seed=3, size=size)) < 1e-5


@torch.no_grad()
def plant_(model: nn.Module) -> None:
    """Every hidden channel of every site twice, with another column of the last layer; scaled by its norm alike."""
    for site in sites_of(model).every:
        assert isinstance(site, ChannelSite)
        if site.norm is not None:
            site.norm.weight[site.width // 2 :] = site.norm.weight[: site.width // 2]
        for first in site.firsts:
            for rows in first.weight.chunk(site.rows if site.packed else 1):
                rows[len(rows) // 2 :] = rows[: len(rows) // 2]
            if first.bias is not None:
                for rows in first.bias.chunk(site.rows if site.packed else 1):
                    rows[len(rows) // 2 :] = rows[: len(rows) // 2]


@pytest.mark.parametrize("name", REDUCIBLE)
def test_planted_redundancy_is_removed(name: str, tmp_path: Path) -> None:
    checkpoint = small(name)
    model = checkpoint.model
    plant_(model)
    images = opened(model, 64, tmp_path)
    moments = calibrate(checkpoint, images, batch_size=8)
    others = pixels(model, 16, seed=5)
    errors = {
        preset: error(reduce(model, moments, method_from_preset(preset, **HALF)).model, model, others)
        for preset in ("best", "none")
    }
    assert errors["best"] < min(1e-3, 0.01 * errors["none"]), errors
    looped = reduce_closed_loop(model, images, method_from_preset("best", **HALF)).model
    assert error(looped, model, others) < 1e-3


class Coarse(nn.Module):
    """Quarters up to 8, so that float32 sums of two thousand products are exact."""

    def forward(self, x: Tensor) -> Tensor:
        return (4.0 * x.clamp(-8.0, 8.0)).round() / 4.0


def coarse(model: nn.Module) -> nn.Module:
    return replaced(model, {f"{site.name}.act": Coarse() for site in sites_of(model).every})


@pytest.mark.parametrize("name", ["convnext_tiny", "convnext_atto", "small_mixer", "small_resmlp"])
def test_statistics_are_those_of_a_loop_over_images_and_positions(name: str) -> None:
    model = coarse(small(name).model)
    images, heard = pixels(model, 8), dict[str, Tensor]()
    handles = [
        model.get_submodule(f"{site.name}.act").register_forward_hook(
            lambda _, __, out, site=site: heard.__setitem__(site.name, out.double())
        )
        for site in sites_of(model).every
    ]
    outputs(model, images)
    for handle in handles:
        handle.remove()
    moments = collect(model, calibration_taps(model, sites_of(model)), [images], device="cpu")
    sizes = {}
    for site in sites_of(model).every:
        of_site, hidden = moments.sites[site.name], heard[site.name]
        assert isinstance(of_site, ChannelMoments)
        assert isinstance(site, ChannelSite)
        assert hidden.shape[0] == 8
        sum_F, gram_FF = torch.zeros(site.width).double(), torch.zeros(site.width, site.width).double()
        rows = 0
        for image in hidden:
            for row in image.reshape(-1, site.width):
                sum_F, gram_FF, rows = sum_F + row, gram_FF + torch.outer(row, row), rows + 1
        assert of_site.tokens == rows
        sizes[site.name] = rows // 8
        assert float((of_site.sum_F - sum_F).norm()) < 1e-9 * float(sum_F.norm())
        assert float((of_site.gram_FF - gram_FF).norm()) < 1e-9 * float(gram_FF.norm())
    expected = {"small_mixer": [32, 16, 32, 16], "small_resmlp": [16, 16]}.get(name, [256, 64, 16, 16, 4])
    assert list(sizes.values()) == expected


def test_all_tokens_are_read_and_have_a_name() -> None:
    for name, words in (("convnext_tiny", "all 4 tokens"), ("small_mixer", "all 16 tokens")):
        model = small(name).model
        assert tokens_to_fit(model, "pooled") is None
        assert named(model, None) == words


def test_what_mixes_hidden_channels_is_refused_with_the_reason(tmp_path: Path) -> None:
    theirs = timm.create_model("convnextv2_tiny", dims=CONVNEXT["dims"], depths=CONVNEXT["depths"]).eval()
    for model, words in ((theirs, "GlobalResponseNorm is timm's own"), (small("small_gmlp").model, "spatial gating")):
        assert not sites_of(model).every
        assert len(sites_of(model).refused) == family_of(model).depth(model)
        assert all(words in refusal.reason for refusal in sites_of(model).refused)
    with pytest.raises(BadInput, match=r"no site of this model can be reduced .*spatial gating unit"):
        calibrate(small("small_gmlp"), opened(small("small_gmlp").model, 8, tmp_path), batch_size=8)


@pytest.mark.parametrize(
    ("name", "words"), [("convnext_tiny", "rows and columns"), ("small_mixer", "weights for each")]
)
def test_tokens_are_not_merged(name: str, words: str) -> None:
    model = small(name).model
    with pytest.raises(BadInput, match=words):
        family_of(model).with_merging(model, Merging(schedule=(2, 2)))
    assert family_of(model).merging_of(model) is None


def test_weights_as_they_were_published_are_read() -> None:
    """Facebook's names of ConvNeXt and of ResMLP."""
    model = small("convnext_atto").model
    theirs = {}
    for name, tensor in model.state_dict().items():
        other = name.replace("head.norm", "norm").replace("head.fc", "head").replace("conv_dw", "dwconv")
        other = other.replace("mlp.fc", "pwconv").replace(".blocks.", ".").replace("stem.", "downsample_layers.0.")
        other = re.sub(r"stages\.(\d)\.downsample\.", r"downsample_layers.\1.", other)
        theirs[other] = tensor
    adapted = timm_convnext.adapted_state(model, theirs)
    assert adapted.keys() == model.state_dict().keys()
    assert all(torch.equal(adapted[name], tensor) for name, tensor in model.state_dict().items())
