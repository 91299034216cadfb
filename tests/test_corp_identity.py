"""At full width every method gives back the dense model, and at half of it one in which half is redundant: a method
that is wrong shows there.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calib.images import Images
from calib.moments import Moments
from calib.store import save as save_moments
from corp_deploy.algebra import channels, queries_keys, scores
from corp_deploy.families.family import sites_of
from corp_deploy.reduction import traced_choice, traced_recovery
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.method import PRESETS, method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from tests import tiny
from tests.command import invoked, refuses


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return tiny.opened(tmp_path_factory.mktemp("identity") / "images.npy", tiny.images(24))


@pytest.fixture(scope="module")
def moments(images: Images) -> Moments:
    return calibrate(tiny.checkpoint(), images, batch_size=8, statistics=Statistics(attention_system=True))


def logits(model: nn.Module) -> Tensor:
    return tiny.ran(model, tiny.images(5, seed=3)).double()


def assert_same(reduced: nn.Module, dense: nn.Module, limit: float = 1e-5) -> None:
    exact = logits(dense)
    assert float((logits(reduced) - exact).norm() / exact.norm()) < limit


def assert_identity(reduced: nn.Module) -> None:
    assert_same(reduced, tiny.checkpoint().model)


CASES = [*((preset, "padded") for preset in PRESETS), ("best", "square")]


@pytest.mark.parametrize(("preset", "geometry"), CASES)
def test_full_width_is_the_dense_model(moments: Moments, images: Images, preset: str, geometry: Any) -> None:
    method = method_from_preset(preset, mlp_sparsity=0.0, attention_sparsity=0.0, geometry=geometry)
    reduced = reduce(tiny.checkpoint().model, moments, method, images=images).model
    assert {site.width for site in sites_of(reduced).every} == {192, 48}
    assert_identity(reduced)


@cache
def planted() -> tuple[Checkpoint, Moments]:
    """The later half of channels and of queries' and keys' dimensions are copies of the first; less comes of them."""
    dense = tiny.checkpoint()
    with torch.no_grad():
        for name, parameter in dense.model.named_parameters():
            if ".attn.qkv." in name:
                by_head = parameter.view(3, 3, 16, -1)
                by_head[:2, :, 8:] = 0.01 * by_head[:2, :, :8]
            elif ".mlp.fc1." in name:
                parameter[96:] = parameter[:96]
            elif name.endswith(".mlp.fc2.weight"):
                parameter[:, 96:] *= 0.01
    opened = tiny.opened(Path(mkdtemp()) / "images.npy", tiny.images(24))
    return dense, calibrate(dense, opened, batch_size=8, statistics=Statistics(attention_system=True))


def halved(preset: str, **changes: Any) -> nn.Module:
    dense, taken = planted()
    asked = {"mlp_sparsity": 0.5, "attention_sparsity": 0.5, "align_hidden": 8, "align_head": 8, **changes}
    return reduce(dense.model, taken, method_from_preset(preset, **asked)).model


def of_recovery(field: str) -> Callable[[Any], Any]:
    """The same result with one tensor a tenth larger."""
    return lambda recovery: replace(recovery, **{field: 1.1 * getattr(recovery, field)})


def another_channel(kept: Tensor) -> Tensor:
    """The first one twice and the last one never."""
    return torch.cat((kept[..., :1], kept[..., :-1]), dim=-1)


MUTANTS: list[tuple[str, Any, str, Callable[[Any], Any]]] = [
    ("best", channels, "affine", of_recovery("weight_OK")),
    ("corp", scores, "kept_from_scores", another_channel),
    ("best", queries_keys, "lowrank", of_recovery("q_map_HRD")),
    ("corp", queries_keys, "logit", of_recovery("k_map_HRD")),
    ("best", traced_choice, "swap", lambda found: replace(found, kept_K=another_channel(found.kept_K))),
]


@pytest.mark.parametrize("preset", ["best", "corp"])
def test_redundancy_goes_at_no_loss(preset: str) -> None:
    assert_same(halved(preset), planted()[0].model, 2e-3)


@pytest.mark.parametrize(("preset", "room", "name", "mutated"), MUTANTS, ids=lambda each: str(each)[:12])
def test_a_wrong_method_loses_something(
    monkeypatch: pytest.MonkeyPatch, preset: str, room: Any, name: str, mutated: Callable[[Any], Any]
) -> None:
    right = getattr(room, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return mutated(right(*args, **kwargs))

    if name == "affine":
        monkeypatch.setattr(traced_recovery, "_OF_VECTORS", {"affine": wrong})
    else:
        monkeypatch.setattr(room, name, wrong)
    with pytest.raises(AssertionError):
        assert_same(halved(preset), planted()[0].model, 2e-3)


def test_what_is_not_asked_for_is_left_alone(moments: Moments) -> None:
    dense = tiny.checkpoint().model
    reduced = reduce(dense, moments, method_from_preset("best", mlp_sparsity=0.0)).model
    name = "blocks.0.attn.qkv.weight"
    assert torch.equal(reduced.get_parameter(name), dense.get_parameter(name))
    attention = reduce(dense, moments, method_from_preset("best", attention_sparsity=0.0))
    assert [site.part for site in attention.sites] == ["qk", "qk"]
    assert attention.sites[0].width == attention.sites[0].width_asked == 16


def test_full_widths_one_by_one_are_the_dense_model_too(moments: Moments) -> None:
    widths = {"blocks.0.mlp": 192, "blocks.1.attn.qk": 48, "blocks.1.attn.v": 48}
    reduction = reduce(tiny.checkpoint().model, moments, method_from_preset("best", geometry="square"), widths=widths)
    parts = dict(zip(widths, ("mlp", "qk", "v"), strict=True))
    assert {site.site: site.part for site in reduction.sites} == parts
    assert_identity(reduction.model)


def test_the_command_keeps_everything_when_told_so(moments: Moments, tmp_path: Path) -> None:
    save(tiny.checkpoint(), tmp_path / "dense")
    save_moments(moments, tmp_path / "m.safetensors")
    words = ["reduce", "--model", tmp_path / "dense", "--moments", tmp_path / "m.safetensors", "-o", tmp_path / "r"]
    refuses("nothing asked for", *words)
    invoked(*words, "--mlp", "0", "--attn", "0")
    assert_identity(load_checkpoint(tmp_path / "r").model)
