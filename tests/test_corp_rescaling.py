"""Rescaling of convolutions to the dense means and variances, in the open loop and in GRAIL's closed loop."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from calib.moments import Moments
from calib.store import save_moments
from corp_deploy.families.family import sites_of
from corp_deploy.families.traced_model import tracing
from corp_deploy.invocation.method_choice import MethodChoice
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method
from corp_deploy.reduction.model import Reduction, reduce
from corp_deploy.store.checkpoint import load_checkpoint, save
from tests import tiny
from tests.command import invoked, run
from tests.refusals import rejects
from tests.small_convnets import checkpoint, digits, error, images_of, library, method, pixels, unseen_digits
from tests.test_traced_chain import assert_saved_is_loaded
from tests.traced_examples import images, written_by

COUNT = 48
Statistic = dict[str, tuple[Tensor, Tensor]]
FORMS = ("resnet18d", "resnet50", "seresnet50", "resnext50_32x4d", "regnety_002", "small_efficientnet")


@cache
def moments(name: str) -> Moments:
    return calibrate(checkpoint(name), images_of(name, COUNT), batch_size=16, statistics=Statistics(residual=True))


class Convolved(fx.Interpreter):
    """A program that records the means and deviations of its convolutions' outputs by the names of their weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(tracing(model).program.graph)
        self.statistics: Statistic = {}

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        if n.target is torch.ops.aten.conv2d.default:
            y_OX = out.double().transpose(0, 1).flatten(1)
            self.statistics[str(n.all_input_nodes[1].target)] = y_OX.mean(1), y_OX.std(1, correction=0)
        return out


def statistics_of(model: nn.Module, images_BCHW: Tensor) -> Statistic:
    """Return the mean and deviation of each output of every convolution on these images."""
    convolved = Convolved(model)
    with torch.no_grad():
        convolved.run(images_BCHW)
    return convolved.statistics


def farthest(reduced: nn.Module, dense: nn.Module) -> float:
    """Return the largest distance from a reduced output's mean and deviation to the nearest dense output's.

    Distances are shares of the convolution's deviation. Reduced outputs have different nearest outputs, unless they
    are far from all.
    """
    own, wanted = (statistics_of(model, pixels(COUNT)) for model in (reduced, dense))
    worst = 0.0
    assert own.keys() == wanted.keys()
    for path, pair in own.items():
        mine, theirs = torch.stack(pair, dim=1), torch.stack(wanted[path], dim=1)
        apart = (mine[:, None] - theirs).norm(dim=2) / wanted[path][1].mean()
        nearest = apart.argmin(dim=1)
        assert (len(nearest.unique()) == len(nearest)) or apart.min(dim=1).values.max() > 1e-3, path
        worst = max(worst, float(apart.min(dim=1).values.max()))
    return worst


def reduce_plain_and_rescaled(name: str, how: str, share: float, **changes: Any) -> tuple[Reduction, Reduction]:
    own, source = checkpoint(name), images_of(name, COUNT)
    grail = replace(method("grail", share), **changes)
    methods = (grail, replace(grail, rescales=True))
    if how == "symmetric":
        plain, rescaled = (reduce_traced(own.model, source, each) for each in methods)
    else:
        plain, rescaled = (reduce(own.model, moments(name), each, images=source) for each in methods)
    return plain, rescaled


@pytest.mark.slow("models")
@pytest.mark.parametrize("how", ["open", "symmetric"])
@pytest.mark.parametrize("name", FORMS)
def test_every_convolution_recovers_dense_means_and_variances(name: str, how: str) -> None:
    plain, rescaled = reduce_plain_and_rescaled(name, how, 0.5)
    assert farthest(rescaled.model, checkpoint(name).model) < 1e-4
    assert farthest(plain.model, checkpoint(name).model) > 1e-2
    own = statistics_of(checkpoint(name).model, pixels(COUNT))
    assert len(own) == sum(isinstance(each, nn.Conv2d) for each in library(name).modules())
    assert "means and variances" in rescaled.decisions[-1]
    assert not any("means and variances" in decision for decision in plain.decisions)


def test_rescaling_works_with_narrowed_streams() -> None:
    name = "resnet18d"
    plain, rescaled = reduce_plain_and_rescaled(name, "open", 0.5, residual_sparsity=0.5)
    assert farthest(rescaled.model, checkpoint(name).model) < 1e-4
    assert farthest(plain.model, checkpoint(name).model) > 1e-2


def test_rescaling_excludes_judging_images() -> None:
    own, source = checkpoint("resnet18d"), images_of("resnet18d", COUNT)
    fit, rest = (source.subset([*each]) for each in (range(32), range(32, COUNT)))
    taken, judging = (calibrate(own, each, batch_size=16) for each in (fit, rest))
    again = replace(method("grail", 0.5), rescales=True)
    judged = reduce(own.model, taken, again, held_out=judging, images=source).model.state_dict()
    without, of_all = (reduce(own.model, taken, again, images=each).model.state_dict() for each in (fit, source))
    torch.testing.assert_close(judged, without, rtol=0, atol=0)
    assert any(not torch.equal(of_all[name], each) for name, each in judged.items())


@pytest.mark.slow("models")
def test_rescaling_halves_grails_error_on_trained_weights() -> None:
    own, source = digits()
    taken, unseen, grail = calibrate(own, source, batch_size=32), unseen_digits(), method("grail", 0.7)
    again = replace(grail, rescales=True)
    for plain, rescaled in (
        (reduce(own.model, taken, grail), reduce(own.model, taken, again, images=source)),
        (reduce_traced(own.model, source, grail), reduce_traced(own.model, source, again)),
    ):
        assert error(rescaled.model, own.model, unseen) < 0.6 * error(plain.model, own.model, unseen)


class Halves(nn.Module):
    """A network in which the later channels are half the first ones and have the same weights behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.input_size = (3, 32, 32)
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3)
        self.again, self.last = nn.Conv2d(6, 6, 1, bias=False), nn.Linear(6, 4)
        with torch.no_grad():
            for each in self.first.parameters():
                each[4:] = 0.5 * each[:4]
            self.second.weight[:, 4:] = self.second.weight[:, :4]

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu()).relu()
        out: Tensor = self.last(self.again(self.again(x).relu()).mean((2, 3)))
        return out


@pytest.mark.parametrize("how", ["open", "symmetric"])
def test_pure_scale_loss_is_restored(how: str, tmp_path: Path) -> None:
    dense = written_by("tests.test_corp_rescaling.Halves")
    dense.model.eval().requires_grad_(False)
    source = tiny.opened(tmp_path / "images.npy", images(24, seed=1), dense.model)
    unseen = torch.from_numpy(images(8, seed=2))
    dropping = replace(method("none", 0.5), align_conv=1, conv_selection="producer-l2")
    widths = {site.name: 4 for site in sites_of(dense.model).every if site.width == 8}
    taken = calibrate(dense, source, batch_size=16)

    def reduced(asked: Method) -> Reduction:
        if how == "symmetric":
            return reduce_traced(dense.model, source, asked, widths=widths)
        return reduce(dense.model, taken, asked, widths=widths, images=source)

    plain, again = (reduced(replace(dropping, rescales=each)) for each in (False, True))
    state = again.model.state_dict()
    assert len(state["first.weight"]) == 4
    assert torch.allclose(state["second.weight"], 1.5 * dense.model.state_dict()["second.weight"][:, :4], rtol=1e-5)
    assert torch.equal(state["again.weight"], dense.model.state_dict()["again.weight"])
    assert error(plain.model, dense.model, unseen) > 1e-2
    assert error(again.model, dense.model, unseen) < 1e-5
    assert_saved_is_loaded(dense, again, tmp_path)


def test_full_width_is_unchanged() -> None:
    own, source = checkpoint("resnet50"), images_of("resnet50", COUNT)
    rescaled = reduce(own.model, moments("resnet50"), method("best", 0.0, rescales=True), images=source)
    assert error(rescaled.model, own.model, pixels(6)) < 1e-5


def test_unsupported_rescaling_is_refused() -> None:
    own, source = checkpoint("resnet50"), images_of("resnet50", COUNT)
    rescaling = method("grail", 0.5, rescales=True)
    message = "--rescale takes means and variances on the calibration images"
    rejects(message, reduce, own.model, moments("resnet50"), rescaling)
    rejects("--rescale: the asymmetric closed loop", reduce_traced, own.model, source, rescaling, loop=Loop())
    message = "--rescale: VisionTransformer has no convolutions that can be rescaled"
    rejects(message, reduce_traced, tiny.checkpoint().model, source, rescaling)
    rejects("--rescale", ReduceOptions, conv=0.5, rescale=True, closed_loop=True)
    assert ReduceOptions(conv=0.5, rescale=True, closed_loop="symmetric").method.rescales
    assert MethodChoice(conv=0.5, rescale=True).method.rescales


@pytest.mark.slow("models")
def test_command_rescales(tmp_path: Path) -> None:
    own = checkpoint("resnet18d")
    save(own, tmp_path / "dense")
    np.save(tmp_path / "images.npy", pixels(COUNT).numpy())
    save_moments(moments("resnet18d"), tmp_path / "m.safetensors")
    words = ["reduce", "--model", tmp_path / "dense", "--moments", tmp_path / "m.safetensors", "--conv", 0.5]
    words += ["--preset", "grail", "--align", "conv=8", "--rescale", "-o", tmp_path / "reduced"]
    seen = ["--images", tmp_path / "images.npy"]
    assert "every convolution rescaled" in " ".join(invoked(*words, *seen).stdout.split())
    assert farthest(load_checkpoint(tmp_path / "reduced").model, own.model) < 1e-4
    assert "--effort, --rescale, --polish, --sparse, heads that are merged" in " ".join(run(*words).stderr.split())
    invoked(*words, *seen, "--closed-loop", code=2)
    invoked(*words, *seen, "--closed-loop", "symmetric")
