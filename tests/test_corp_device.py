"""Devices of calibration, reduction and closed loops, and work captured as CUDA graphs."""

from typing import Any

import pytest
import torch
from torch import nn

from calib.images import Images
from calib.moments import HeadMoments, Moments, moments_on_device
from corp_deploy.algebra import obs
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import Reduction, reduce
from corp_deploy.store import checkpoint as checkpoints
from tests import tiny

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return tiny.opened(tmp_path_factory.mktemp("images") / "images.npy", tiny.images(24))


@pytest.fixture(scope="module")
def moments(images: Images) -> Moments:
    return calibrate(tiny.checkpoint(), images, batch_size=8, statistics=Statistics(attention_system=True))


def method(preset: str, **changes: Any) -> Method:
    whole: dict[str, Any] = {"mlp_sparsity": 0.5, "attention_sparsity": 0.5, "align_hidden": 8, "align_head": 8}
    return method_from_preset(preset, **(whole | changes))


CASES = [
    *((preset, {}) for preset in ("best", "corp", "corp-v1", "grail", "grail-fold", "fold", "vbp", "none")),
    ("best", {"geometry": "square"}),
    ("corp", {"mlp_selection": "active"}),
    ("corp", {"mlp_selection": "wanda"}),
]


def test_sums_already_on_the_device_are_not_copied(moments: Moments) -> None:
    site = moments.sites["blocks.0.attn.qk"]
    assert isinstance(site, HeadMoments)
    moved = moments_on_device(site, "cpu")
    assert moved.qq_HDD is site.qq_HDD
    assert (moved.images, moved.tokens, moved.kept_HK) == (site.images, site.tokens, None)


def test_checkpoint_is_copied_only_to_another_device() -> None:
    checkpoint = tiny.checkpoint()
    before = {name: parameter.data_ptr() for name, parameter in checkpoint.model.named_parameters()}
    on_meta = checkpoints.on_device(checkpoint, "meta")
    assert {parameter.device.type for parameter in on_meta.model.parameters()} == {"meta"}
    assert checkpoints.on_device(checkpoint, "cpu") is checkpoint
    assert {name: parameter.data_ptr() for name, parameter in checkpoint.model.named_parameters()} == before
    assert (on_meta.architecture, on_meta.lineage) == (checkpoint.architecture, checkpoint.lineage)


@needs_gpu
def test_gpu_calibration_and_loop_leave_the_model_on_its_device(images: Images) -> None:
    checkpoint = tiny.checkpoint()
    calibrate(checkpoint, images, batch_size=8, device="cuda")
    assert not next(checkpoint.model.parameters()).is_cuda
    on_gpu = tiny.checkpoint().model.cuda()
    assert next(reduce_traced(on_gpu, images, method("best"), loop=Loop()).model.parameters()).is_cuda
    assert next(on_gpu.parameters()).is_cuda


def relative_error(one: nn.Module, other: nn.Module) -> float:
    return tiny.relative(*(tiny.ran(each.cpu(), tiny.images(8, seed=3)) for each in (one, other)))


@needs_gpu
@pytest.mark.parametrize(("preset", "changes"), CASES)
def test_gpu_solves_equal_cpu_solves(preset: str, changes: Any, moments: Moments, images: Images) -> None:
    half = method(preset, **changes)
    on_cpu: Reduction = reduce(tiny.checkpoint().model, moments, half, images=images)
    on_gpu = reduce(tiny.checkpoint().model.cuda(), moments, half, images=images)
    assert relative_error(on_gpu.model, on_cpu.model) < 1e-4


@needs_gpu
def test_the_closed_loop_runs_on_a_gpu(images: Images) -> None:
    on_cpu = reduce_traced(tiny.checkpoint().model, images, method("best"), loop=Loop())
    on_gpu = reduce_traced(tiny.checkpoint().model.cuda(), images, method("best"), loop=Loop())
    assert relative_error(on_gpu.model, on_cpu.model) < 1e-2


@needs_gpu
def test_captured_removals_equal_single_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x_NF = torch.randn(400, 200, generator=generator, dtype=torch.float64)
    covariance_FF, weight_OF = x_NF.T @ x_NF, torch.randn(50, 200, generator=generator, dtype=torch.float64)
    with obs.removals.keeping():
        captured = obs.obs(covariance_FF.cuda(), weight_OF.cuda(), ridge_rel=1e-6)
        assert obs.removals.graphs
    assert not obs.removals.graphs
    monkeypatch.setattr(obs, "removals", obs.removals_of_block)
    plain = obs.obs(covariance_FF.cuda(), weight_OF.cuda(), ridge_rel=1e-6)
    assert captured.order_F.equal(plain.order_F)
    assert captured.error_F.equal(plain.error_F)


def test_captured_graphs_are_kept_until_the_outermost_context_ends() -> None:
    captured: Any = obs.CapturedWork(lambda tensor, count: (tensor[:count] * 2.0,))
    with captured.keeping():
        captured.graphs["outer"] = None
        with captured.keeping():
            (doubled,) = captured(torch.arange(3.0), count=2)
        assert doubled.tolist() == [0.0, 2.0]
        assert captured.graphs
    assert not captured.graphs
