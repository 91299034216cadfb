"""Channels that are divided by a mean over them: those that stay tell the mean of all."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from corp_deploy.families.architecture import Architecture
from corp_deploy.families.family import sites_of
from corp_deploy.families.traced_model import traced, tracing
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.traced_loop import reduce_traced
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.inputs import arrays_for_model

D, HIDDEN, TOKENS = 6, 16, 9


class Responding(nn.Module):
    """An MLP with a global response norm, its channels last or second; half of them give twice what others do."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self.fc1, self.fc2, self.last = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D), last
        self.weight, self.bias = nn.Parameter(torch.randn(HIDDEN)), nn.Parameter(torch.randn(HIDDEN))
        with torch.no_grad():
            self.fc1.weight[1::2], self.fc1.bias[1::2] = 2 * self.fc1.weight[::2], 2 * self.fc1.bias[::2]
            self.weight[1::2] = self.weight[::2] / 2
        self.inputs = {"x": (TOKENS, D)}

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.fc1(x))
        h = h if self.last else h.transpose(1, 2)
        norms = h.norm(dim=1 if self.last else 2, keepdim=True)
        shares = norms / (norms.mean(dim=-1 if self.last else 1, keepdim=True) + 1e-6)
        shape = (-1,) if self.last else (-1, 1)
        h = h + torch.addcmul(self.bias.view(shape), self.weight.view(shape), h * shares)
        out: Tensor = x + self.fc2(h if self.last else h.transpose(1, 2))
        return out


@pytest.mark.parametrize("last", [True, False])
def test_redundant_channels_go_at_no_loss(last: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Responding(last=last).eval()
    model = traced(plain, Architecture(name="Responding", family="module"))
    inputs = torch.randn(40, TOKENS, D)
    torch.testing.assert_close(tracing(model).program.graph(inputs), plain(inputs))
    (site,) = sites_of(model).every
    assert site.width == HIDDEN
    save_file({"x": inputs}, tmp_path / "x.safetensors")
    checkpoint = Checkpoint(model=model, architecture=Architecture(name="Responding", family="module"), lineage={})
    moments = calibrate(checkpoint, arrays_for_model(model, tmp_path / "x.safetensors"), batch_size=8)
    dense, errors = model(inputs).detach(), dict[str, float]()
    for preset in ("none", "best"):
        reduction = reduce(model, moments, method_from_preset(preset, mlp_sparsity=0.5, align_hidden=1))
        (report,) = reduction.sites
        assert report.width == HIDDEN // 2
        errors[preset] = float((reduction.model(inputs) - dense).norm() / dense.norm())
        means = [value for name, value in reduction.model.state_dict().items() if "mean_weight" in name]
        assert [tuple(each.shape) for each in means] == [(1, HIDDEN // 2)]
        assert bool((means[0] >= 0).all())
    assert errors["best"] < 1e-4 < 1e-2 < errors["none"], errors


def test_loops_leave_the_mean_to_the_channels_that_stay(tmp_path: Path) -> None:
    """So few images would tell weights below zero of a mean that is divided by."""
    torch.manual_seed(0)
    plain = Responding(last=True).eval()
    torch.nn.init.normal_(plain.fc1.weight)
    model = traced(plain, Architecture(name="Responding", family="module"))
    save_file({"x": torch.randn(10, TOKENS, D)}, tmp_path / "x.safetensors")
    opened = arrays_for_model(model, tmp_path / "x.safetensors")
    looped = reduce_traced(model, opened, method_from_preset("best", mlp_sparsity=0.5, align_hidden=1), loop=Loop())
    (weight,) = (value for name, value in looped.model.state_dict().items() if name.endswith("mean_weight_0"))
    assert bool((weight >= 0).all())
    assert not [name for name in looped.model.state_dict() if "mean_weight_0_bias" in name]


def test_a_mean_that_nothing_is_divided_by_stays_one() -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(-1, keepdim=True)

    model = nn.Sequential(nn.Linear(D, D), Centred(), nn.Linear(D, D)).eval()
    model.inputs = {"input": (TOKENS, D)}  # type: ignore[assignment]
    program = tracing(traced(model, Architecture(name="Centred", family="module"))).program
    assert not [node for node in program.nodes if "mean_weight" in str(node.target)]
