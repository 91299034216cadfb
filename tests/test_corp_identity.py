"""At full width every method gives back the dense model, by its own code: a method that is wrong shows there."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from calib.images import Images
from calib.moments import Moments
from calib.store import save as save_moments
from corp_deploy.algebra import queries_keys as recover_attention
from corp_deploy.algebra import scores as select
from corp_deploy.cli import main
from corp_deploy.families import timm_vit as vit
from corp_deploy.families.widths import HeadWidths
from corp_deploy.reduction import channels as reduce_mlp
from corp_deploy.reduction import folded_channels, judged_folds
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.method import PRESETS, method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import load_checkpoint, save
from tests import tiny

SHRINKING = ("grail", "grail-fold")  # their published ridge shrinks the whole layer, at full width too


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return tiny.opened(tmp_path_factory.mktemp("identity") / "images.npy", tiny.images(24))


@pytest.fixture(scope="module")
def moments(images: Images) -> Moments:
    return calibrate(tiny.checkpoint(), images, batch_size=8, statistics=Statistics(attention_system=True))


def logits(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        out: Tensor = model(torch.from_numpy(tiny.images(5, seed=3)))
    return out.double()


def at_full_width(moments: Moments, images: Images, preset: str, geometry: str = "padded") -> nn.Module:
    ridge_rel = 1e-12 if preset in SHRINKING else None
    method = method_from_preset(
        preset, mlp_sparsity=0.0, attention_sparsity=0.0, geometry=geometry, ridge_rel=ridge_rel
    )
    return reduce(tiny.checkpoint().model, moments, method, images=images).model


def assert_identity(reduced: nn.Module) -> None:
    dense = logits(tiny.checkpoint().model)
    assert float((logits(reduced) - dense).norm() / dense.norm()) < 1e-5


CASES = [*((preset, "padded") for preset in PRESETS), ("best", "square")]


@pytest.mark.parametrize(("preset", "geometry"), CASES)
def test_full_width_is_the_dense_model(moments: Moments, images: Images, preset: str, geometry: str) -> None:
    reduced = at_full_width(moments, images, preset, geometry)
    parts = vit.sites(reduced)
    assert {part.width for part in parts.channels} == {192}
    assert {(part.qk, part.v) for part in parts.heads} == {(16, 16)}
    assert_identity(reduced)


def of_recovery(field: str) -> Callable[[Any], Any]:
    """The same result with one tensor a hundredth larger."""
    return lambda recovery: replace(recovery, **{field: 1.01 * getattr(recovery, field)})


def another_channel(kept: Tensor) -> Tensor:
    """The first one twice and the last one never."""
    return torch.cat((kept[..., :1], kept[..., :-1]), dim=-1)


MUTANTS = [
    *((preset, "padded", "mlp", of_recovery("weight_OK")) for preset in PRESETS if "fold" not in preset),
    *((preset, "padded", "fold", of_recovery("weight_KI")) for preset in ("grail-fold", "fold")),
    ("grail-fold", "padded", "recovered_from_gram", of_recovery("solution_OK")),
    ("fold", "padded", "refit_toward", lambda refit: replace(refit, weight_OK=refit.weight_OK + torch.eye(48, 192))),
    *((preset, "padded", "ranking", another_channel) for preset in ("corp", "corp-v1", "grail", "vbp", "none")),
    ("best", "padded", "swap", lambda found: replace(found, kept_K=another_channel(found.kept_K))),
    ("best", "padded", "lowrank", of_recovery("q_map_HRD")),
    ("corp", "padded", "logit", of_recovery("k_map_HRD")),
    ("corp-v1", "padded", "logit_v1", of_recovery("q_map_HRD")),
    ("none", "padded", "select", of_recovery("k_map_HRD")),
]


@pytest.mark.parametrize(("preset", "geometry", "place", "mutated"), MUTANTS)
def test_a_wrong_method_is_not_the_identity(
    moments: Moments,
    images: Images,
    monkeypatch: pytest.MonkeyPatch,
    preset: str,
    geometry: str,
    place: str,
    mutated: Callable[[Any], Any],
) -> None:
    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: mutated(right(*args, **kwargs))

    targets: dict[str, tuple[Any, str]] = {
        **{name: (folded_channels, name) for name in ("fold", "recovered_from_gram")},
        "refit_toward": (judged_folds, "refit_toward"),
        "swap": (reduce_mlp, "swap"),
        "ranking": (select, "kept_from_scores"),
    }
    if place == "mlp":
        name = PRESETS[preset].mlp_recovery
        monkeypatch.setitem(reduce_mlp.RECOVERIES, name, wrong(reduce_mlp.RECOVERIES[name]))
    else:
        module, function = targets.get(place, (recover_attention, place))
        monkeypatch.setattr(module, function, wrong(getattr(module, function)))
    with pytest.raises(AssertionError):
        assert_identity(at_full_width(moments, images, preset, geometry))


def test_what_is_not_asked_for_is_left_alone(moments: Moments) -> None:
    dense = tiny.checkpoint().model
    reduced = reduce(dense, moments, method_from_preset("best", mlp_sparsity=0.0)).model
    name = "blocks.0.attn.qkv.weight"
    assert torch.equal(reduced.get_parameter(name), dense.get_parameter(name))
    attention = reduce(dense, moments, method_from_preset("best", attention_sparsity=0.0))
    assert [site.part for site in attention.sites] == ["qk", "qk"]
    assert attention.sites[0].width == attention.sites[0].width_asked == 16


def test_full_widths_one_by_one_are_the_dense_model_too(moments: Moments) -> None:
    widths: dict[str, int | HeadWidths] = {"blocks.0.mlp": 192, "blocks.1.attn": HeadWidths(qk=16, v=16)}
    reduction = reduce(tiny.checkpoint().model, moments, method_from_preset("best", geometry="square"), widths=widths)
    assert [(site.site, site.part) for site in reduction.sites] == [
        ("blocks.0.mlp", "mlp"),
        ("blocks.1.attn", "qk"),
        ("blocks.1.attn", "v"),
    ]
    assert_identity(reduction.model)


def test_the_command_keeps_everything_when_told_so(moments: Moments, tmp_path: Path) -> None:
    save(tiny.checkpoint(), tmp_path / "dense")
    save_moments(moments, tmp_path / "m.safetensors")
    words = ["reduce", "--model", tmp_path / "dense", "--moments", tmp_path / "m.safetensors", "-o", tmp_path / "r"]
    nothing = CliRunner().invoke(main, [str(word) for word in words])
    assert nothing.exit_code == 2
    assert "nothing asked for" in nothing.stderr
    result = CliRunner().invoke(main, [*map(str, words), "--mlp", "0", "--attn", "0"])
    assert result.exit_code == 0, result.output
    assert_identity(load_checkpoint(tmp_path / "r").model)
