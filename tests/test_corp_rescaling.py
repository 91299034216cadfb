"""Convolutions rescaled to the dense ones' means and variances: by hooks on both models, open loop and GRAIL's."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from calib.moments import Moments
from calib.store import save as save_moments
from corp_deploy.algebra.patches import rescaled_outputs
from corp_deploy.cli import main
from corp_deploy.invocation.method_choice import MethodChoice
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.closed_loop import reduce_closed_loop
from corp_deploy.reduction.model import Reduction, reduce
from corp_deploy.reduction.rescaling import convolutions
from corp_deploy.reduction.symmetric_loop import reduce_symmetric_loop
from corp_deploy.release.recipe_reduce import ReduceTable
from corp_deploy.store.checkpoint import load_checkpoint, save
from ground.errors import BadInput
from tests import tiny
from tests.small_convnets import checkpoint, digits, error, images_of, method, outputs, pixels, unseen_digits

COUNT = 48
FORMS = ("resnet18d", "resnet50", "seresnet50", "resnext50_32x4d", "regnety_002", "small_efficientnet")


@cache
def moments(name: str) -> Moments:
    return calibrate(checkpoint(name), images_of(name, COUNT), batch_size=16, statistics=Statistics(residual=True))


def test_the_scale_by_outputs_is_the_scale_by_columns() -> None:
    """Mean and variance of W' u + b' by the samples; what doesn't vary meets the mean."""
    generator = torch.Generator().manual_seed(0)
    u_XU = torch.randn(200, 5, generator=generator, dtype=torch.float64) + 1.0
    weight = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    weight[2] = 0.0
    bias, mean = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    wanted = torch.tensor([0.5, 2.0, 3.0, 0.0], dtype=torch.float64)
    y_XO = u_XU @ weight.T + bias
    new, offset = rescaled_outputs(weight, bias, y_XO.mean(0), y_XO.var(0, correction=0), mean, wanted)
    z_XO = u_XU @ new.T + offset
    torch.testing.assert_close(z_XO.mean(0), mean)
    torch.testing.assert_close(z_XO.var(0, correction=0), torch.tensor([0.5, 2.0, 0.0, 0.0], dtype=torch.float64))


def given_by(model: nn.Module, shown: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and deviation of each output of every convolution that runs on these images."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    handles = []
    for path, conv in convolutions(model).items():

        def hook(_: nn.Module, __: Any, y: Tensor, path: str = path) -> None:
            y_OX = y.double().transpose(0, 1).flatten(1)
            found[path] = y_OX.mean(1), y_OX.std(1, correction=0)

        handles.append(conv.register_forward_hook(hook))
    outputs(model, shown)
    for handle in handles:
        handle.remove()
    return found


def farthest(reduced: nn.Module, dense: nn.Module) -> float:
    """From a reduced output's mean and deviation to the nearest ones of the dense convolution, each met once, as a
    share of the convolution's deviation; of all the worst.
    """
    worst = 0.0
    own, wanted = (given_by(model, pixels(COUNT)) for model in (reduced, dense))
    assert own.keys() == wanted.keys()
    for path, pair in own.items():
        mine, theirs = torch.stack(pair, dim=1), torch.stack(wanted[path], dim=1)
        apart = (mine[:, None] - theirs).norm(dim=2) / wanted[path][1].mean()
        nearest = apart.argmin(dim=1)
        assert (len(nearest.unique()) == len(nearest)) or apart.min(dim=1).values.max() > 1e-3, path
        worst = max(worst, float(apart.min(dim=1).values.max()))
    return worst


def rescaled_and_not(name: str, how: str, share: float, **changes: Any) -> tuple[Reduction, Reduction]:
    own, source = checkpoint(name), images_of(name, COUNT)
    plain = replace(method("grail", share), **changes)
    again = replace(plain, rescales=True)
    if how == "symmetric":
        plain_too, rescaled = (reduce_symmetric_loop(own.model, source, each) for each in (plain, again))
    else:
        plain_too, rescaled = (reduce(own.model, moments(name), each, images=source) for each in (plain, again))
    return plain_too, rescaled


@pytest.mark.slow("models")
@pytest.mark.parametrize("how", ["open", "symmetric"])
@pytest.mark.parametrize("name", FORMS)
def test_every_convolution_has_the_dense_means_and_variances(name: str, how: str) -> None:
    plain, rescaled = rescaled_and_not(name, how, 0.5)
    assert farthest(rescaled.model, checkpoint(name).model) < 1e-4
    assert farthest(plain.model, checkpoint(name).model) > 1e-2  # it can tell
    assert "means and variances" in rescaled.said[-1]
    assert not any("means and variances" in said for said in plain.said)


@pytest.mark.parametrize("name", ["resnet18d", "small_efficientnet"])
def test_and_where_streams_have_lost_channels(name: str) -> None:
    plain, rescaled = rescaled_and_not(name, "open", 0.5, residual_sparsity=0.5)
    assert farthest(rescaled.model, checkpoint(name).model) < 1e-4
    assert farthest(plain.model, checkpoint(name).model) > 1e-2


@pytest.mark.parametrize("name", ["resnet18", "resnext50_32x4d", "small_efficientnet", "small_mobilenetv4"])
def test_it_lowers_the_error_of_much_reduced_models(name: str) -> None:
    """Of most, on images never seen, with 70 % of the channels gone; that every form gains isn't so."""
    plain, rescaled = rescaled_and_not(name, "open", 0.7)
    dense, unseen = checkpoint(name).model, pixels(32, seed=5)
    assert error(rescaled.model, dense, unseen) < error(plain.model, dense, unseen)


@pytest.mark.slow("models")
def test_of_trained_weights_it_lowers_grails_error_by_half() -> None:
    own, source = digits()
    taken, unseen, grail = calibrate(own, source, batch_size=32), unseen_digits(), method("grail", 0.7)
    again = replace(grail, rescales=True)
    for plain, rescaled in (
        (reduce(own.model, taken, grail), reduce(own.model, taken, again, images=source)),
        (reduce_symmetric_loop(own.model, source, grail), reduce_symmetric_loop(own.model, source, again)),
    ):
        assert error(rescaled.model, own.model, unseen) < 0.6 * error(plain.model, own.model, unseen)


def test_nothing_removed_stays() -> None:
    own, source = checkpoint("resnet50"), images_of("resnet50", COUNT)
    rescaled = reduce(own.model, moments("resnet50"), method("best", 0.0, rescales=True), images=source)
    assert error(rescaled.model, own.model, pixels(6)) < 1e-5


def test_what_it_can_not_do_is_refused() -> None:
    own, source = checkpoint("resnet50"), images_of("resnet50", COUNT)
    rescaling = method("grail", 0.5, rescales=True)
    with pytest.raises(BadInput, match="--rescale takes means and variances on the calibration images"):
        reduce(own.model, moments("resnet50"), rescaling)
    with pytest.raises(BadInput, match="--rescale: the asymmetric closed loop"):
        reduce_closed_loop(own.model, source, rescaling)
    without = tiny.checkpoint()
    with pytest.raises(BadInput, match="--rescale: VisionTransformer has no rows of convolutions"):
        reduce_symmetric_loop(without.model, source, rescaling)
    with pytest.raises(BadInput, match=r"\[reduce\].*rescale"):
        ReduceTable(conv=0.5, rescale=True, closed_loop=True)
    assert ReduceTable(conv=0.5, rescale=True, closed_loop="symmetric").method.rescales
    assert MethodChoice(conv=0.5, rescale=True).method.rescales


@pytest.mark.slow("models")
def test_the_command_rescales(tmp_path: Path) -> None:
    own = checkpoint("resnet18d")
    save(own, tmp_path / "dense")
    np.save(tmp_path / "images.npy", pixels(COUNT).numpy())
    save_moments(moments("resnet18d"), tmp_path / "m.safetensors")
    words = ["reduce", "--model", tmp_path / "dense", "--moments", tmp_path / "m.safetensors", "--conv", 0.5]
    words += ["--preset", "grail", "--align", "conv=8", "--rescale"]
    seen = ["--images", tmp_path / "images.npy"]

    def invoked(*more: Any) -> Any:
        return CliRunner().invoke(main, [str(each) for each in (*words, *more, "-o", tmp_path / "reduced")])

    done = invoked(*seen)
    assert done.exit_code == 0, done.output
    assert "every convolution rescaled" in " ".join(done.stdout.split())
    assert farthest(load_checkpoint(tmp_path / "reduced").model, own.model) < 1e-4
    assert "--closed-loop, --rescale, --polish, --sparse, heads that are merged" in " ".join(invoked().stderr.split())
    assert invoked(*seen, "--closed-loop").exit_code == 2
    assert invoked(*seen, "--closed-loop", "symmetric").exit_code == 0
