"""Models that aren't deterministic or give NaN are refused, and models of positive inputs are reduced."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import corp_deploy
from corp_deploy.families.traced_model import trace_model
from corp_deploy.reduction.steady_inputs import require_steady_on
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.traced.programs.steady import NotFinite, _Summary, require_steady
from corp_deploy.traced.programs.tracing import trace
from tests.refusals import rejects

Change = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """A small network that may change its pixels by `first` and its hidden values by `second`."""

    input_size = (3, 16, 16)

    def __init__(self, first: Change | None = None, second: Change | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = first, second
        self.conv, self.hidden, self.head = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 32), nn.Linear(32, 5)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first is None else self.first(self, x)
        x = F.relu(self.conv(x)).mean((2, 3))
        x = x if self.second is None else self.second(self, x)
        return self.head(F.gelu(self.hidden(x)))


NOISY: dict[str, Change] = {
    "dropout": lambda _, x: F.dropout(x, 0.1),
    "dropout in drop": lambda net, x: net.drop.train()(x),
    "rand": lambda _, x: x + torch.randn_like(x) * 0.1,
    "rrelu": lambda _, x: F.rrelu(x - 0.2, training=True),
    "bernoulli": lambda _, x: x * torch.bernoulli(torch.full_like(x, 0.5)),
}
POSITIVE: dict[str, Change] = {
    "log": lambda _, x: torch.log(x + 0.5),
    "sqrt": lambda _, x: torch.sqrt(x),
    "power": lambda _, x: x ** (1 / 2.2),
}
IMAGES = np.random.default_rng(0).random((24, *Net.input_size), dtype=np.float32)


@pytest.mark.parametrize("name", NOISY)
def test_random_operations_are_refused_before_calibration(name: str, tmp_path: Path) -> None:
    message = rf"{name}.* gives different values at each call.*training=self\.training"
    rejects(message, corp_deploy.calibrate, Net(second=NOISY[name]), IMAGES, tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", POSITIVE)
def test_models_of_positive_inputs_are_reduced(name: str, tmp_path: Path) -> None:
    model = Net(first=POSITIVE[name])
    moments = corp_deploy.calibrate(model, IMAGES, tmp_path / "m.safetensors")
    reduced = corp_deploy.reduce(model, moments, tmp_path / "half", mlp=0.5, align={"mlp": 8})
    assert reduced.macs[1] < reduced.macs[0]
    assert bool(reduced.model(torch.from_numpy(IMAGES[:2])).isfinite().all())


def test_nan_on_the_users_images_is_refused_before_calibration(tmp_path: Path) -> None:
    model = Net(first=lambda _, x: torch.log(x - 2.0))
    rejects("log in forward gives NaN or infinity on the first images",
            corp_deploy.calibrate, model, IMAGES, tmp_path / "m.safetensors")  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_nan_on_any_input_is_named() -> None:
    model = Net(first=lambda _, x: torch.log(x.clamp(max=-1.0)))
    program = trace(model, [torch.zeros(2, *Net.input_size)])
    with pytest.raises(NotFinite, match="log in forward gives NaN"):
        require_steady(program, [torch.randn(2, *Net.input_size)])


def test_infinities_from_masks_are_accepted() -> None:
    model = Net(second=lambda _, x: torch.where(x > 1e9, torch.full_like(x, -torch.inf), x))
    program = trace(model, [torch.zeros(2, *Net.input_size)])
    require_steady(program, [torch.randn(2, *Net.input_size)])


def test_two_batches_of_the_users_images_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[Tensor]()
    monkeypatch.setattr(
        "corp_deploy.reduction.steady_inputs.require_steady", lambda program, each, called: tried.extend(each)
    )
    np.save(tmp_path / "x.npy", IMAGES)
    model = trace_model(Net().eval(), Architecture(name="net", family="module"))
    require_steady_on(model, images_for_model(model, tmp_path / "x.npy"))
    assert torch.equal(torch.cat(tried), torch.from_numpy(IMAGES[:4]))
    assert [len(each) for each in tried] == [2, 2]


def test_rounding_differences_are_accepted() -> None:
    one = _Summary(sums=((1.0, 10.0),), is_number=True, is_finite=True)
    for change, alike in ((0.0, True), (1e-6, True), (1e-3, False)):
        other = _Summary(sums=((1.0 + change, 10.0),), is_number=True, is_finite=True)
        assert one.is_like(other) is alike
