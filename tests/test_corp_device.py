"""Reduction runs where the model and its statistics are: nothing in it is made on torch's default device.

Within `torch.device("meta")` whatever names no device comes without values, so the answer would differ or fail.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calib.images import Images
from calib.input_set import Batch
from calib.moments import HeadMoments, Moments, on_device
from corp_deploy.planning.budget import allocate, dense_cost
from corp_deploy.planning.curves import cost_curves, eliminations
from corp_deploy.planning.probe import Probe
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.closed_loop import reduce_closed_loop
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import Reduction, reduce
from corp_deploy.reduction.shown_inputs import BATCH_SIZE
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


def require_same(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert theirs.device == mine.device, name
        assert torch.equal(mine, theirs), name


CASES = [
    *((preset, {}) for preset in ("best", "corp", "corp-v1", "grail", "grail-fold", "fold", "vbp", "none")),
    ("best", {"geometry": "square"}),
    ("corp", {"mlp_selection": "active"}),
    ("corp", {"mlp_selection": "wanda"}),
]


@pytest.mark.parametrize(("preset", "changes"), CASES)
def test_reduction_makes_nothing_on_the_default_device(
    preset: str, changes: Any, moments: Moments, images: Images
) -> None:
    model, wanted = tiny.checkpoint().model, method(preset, **changes)
    held = list(images.read(BATCH_SIZE))

    class Held:
        """Images that are in memory: reading files is not what is asked about."""

        ids, count = images.ids, images.count

        def read(self, _: int) -> list[Batch[Tensor]]:
            return held

    plain = reduce(model, moments, wanted, images=images)
    with torch.device("meta"):
        found = reduce(model, moments, wanted, images=Held())  # type: ignore[arg-type]
    require_same(plain.model, found.model)
    assert found.sites == plain.sites


@pytest.mark.parametrize("preset", ["best", "corp"])
def test_the_closed_loop_makes_nothing_on_the_default_device(preset: str, images: Images) -> None:
    model, wanted = tiny.checkpoint().model, method(preset)
    held = [batch.clone() for batch in images.batches(8)]

    class Held:
        """Images that are in memory: reading files is not what is asked about."""

        ids = images.ids

        def batches(self, _: int) -> list[Tensor]:
            return held

    plain = reduce_closed_loop(model, Held(), wanted)  # type: ignore[arg-type]
    with torch.device("meta"):
        found = reduce_closed_loop(model, Held(), wanted)  # type: ignore[arg-type]
    require_same(plain.model, found.model)
    assert found.sites == plain.sites


def test_budgets_make_nothing_on_the_default_device(images: Images, moments: Moments) -> None:
    model, wanted = tiny.checkpoint().model, method("best", mlp_sparsity=0.0, attention_sparsity=0.0)
    pixels = next(iter(images.batches(8)))

    def widths() -> Any:
        known = eliminations(model, moments, wanted)
        probe = Probe(model=model, moments=moments, method=wanted, inputs=pixels, eliminations=known)
        return allocate(list(cost_curves(probe, "macs")), dense_cost(model, "macs"), 0.7).widths

    plain = widths()
    with torch.device("meta"):
        assert widths() == plain


def test_sums_are_the_same_ones_where_they_are_already(moments: Moments) -> None:
    site = moments.sites["blocks.0.attn"]
    assert isinstance(site, HeadMoments)
    moved = on_device(site, "cpu")
    assert moved.qq_HDD is site.qq_HDD
    assert (moved.images, moved.tokens, moved.kept_HK) == (site.images, site.tokens, None)


def test_a_checkpoint_elsewhere_is_a_copy_and_here_it_is_itself() -> None:
    checkpoint = tiny.checkpoint()
    before = {name: parameter.data_ptr() for name, parameter in checkpoint.model.named_parameters()}
    there = checkpoints.on_device(checkpoint, "meta")
    assert {parameter.device.type for parameter in there.model.parameters()} == {"meta"}
    assert checkpoints.on_device(checkpoint, "cpu") is checkpoint
    assert {name: parameter.data_ptr() for name, parameter in checkpoint.model.named_parameters()} == before
    assert (there.architecture, there.lineage) == (checkpoint.architecture, checkpoint.lineage)


def test_calibrating_elsewhere_leaves_the_callers_model_where_it_is(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, seen = tiny.checkpoint(), dict[str, Any]()

    def take(model: nn.Module, sites: Any, *_: Any, **options: Any) -> None:
        seen.update(model=model, sites=sites, device=options["device"])

    monkeypatch.setattr("corp_deploy.reduction.calibrate.calib_calibrate.calibrate", take)
    calibrate(checkpoint, images, batch_size=8, device="meta")
    assert seen["device"] == "meta"
    assert {parameter.device.type for parameter in seen["model"].parameters()} == {"meta"}
    assert seen["sites"][-1].output in set(seen["model"].modules())
    assert {parameter.device.type for parameter in checkpoint.model.parameters()} == {"cpu"}
    assert not checkpoint.model.training


@needs_gpu
def test_neither_calibrating_nor_the_loop_on_a_gpu_moves_a_model(images: Images) -> None:
    checkpoint = tiny.checkpoint()
    calibrate(checkpoint, images, batch_size=8, device="cuda")
    assert not next(checkpoint.model.parameters()).is_cuda
    there = tiny.checkpoint().model.cuda()
    assert next(reduce_closed_loop(there, images, method("best")).model.parameters()).is_cuda
    assert next(there.parameters()).is_cuda


def relative_error(one: nn.Module, other: nn.Module) -> float:
    pixels = torch.from_numpy(tiny.images(8, seed=3))
    with torch.inference_mode():
        mine, theirs = one.cpu()(pixels).double(), other.cpu()(pixels).double()
    return float((mine - theirs).norm() / theirs.norm())


@needs_gpu
@pytest.mark.parametrize(("preset", "changes"), CASES)
def test_a_gpu_solves_the_same(preset: str, changes: Any, moments: Moments, images: Images) -> None:
    wanted = method(preset, **changes)
    here: Reduction = reduce(tiny.checkpoint().model, moments, wanted, images=images)
    there = reduce(tiny.checkpoint().model.cuda(), moments, wanted, images=images)
    assert relative_error(there.model, here.model) < 1e-4


@needs_gpu
def test_the_closed_loop_runs_on_a_gpu(images: Images) -> None:
    here = reduce_closed_loop(tiny.checkpoint().model, images, method("best"))
    there = reduce_closed_loop(tiny.checkpoint().model.cuda(), images, method("best"))
    assert relative_error(there.model, here.model) < 1e-2
