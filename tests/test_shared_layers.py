"""Layers that a model calls more than once, at other numbers of tokens or with other keys."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from corp_deploy.families.traced_model import tracing
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.curvature import effects_of_changes
from corp_deploy.planning.execution import reduce_as_asked
from corp_deploy.planning.request import build_request
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.store.module_model import checkpoint_from_module
from tests.refusals import rejects


class Shared(nn.Module):
    """`attn` and `mlp` serve all tokens, one query that pools them, and a few keys."""

    input_size = (3, 16, 16)

    def __init__(self, kind: str, outputs: int = 1) -> None:
        super().__init__()
        self.kind = kind
        self.cut = nn.Conv2d(3, 32, 4, 4)
        self.attn = nn.MultiheadAttention(32, 2, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)
        self.q = nn.Parameter(torch.randn(1, 1, 32))
        self.head = nn.Linear(32, outputs)

    def attended(self, asking: Tensor, keys: Tensor) -> Tensor:
        attended: Tensor = self.attn(asking, keys, keys)[0]
        return attended

    def mixed(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.nn.functional.gelu(self.fc1(x)))

    def forward(self, images: Tensor) -> Tensor:
        x = self.cut(images).flatten(2).transpose(1, 2)
        asking = self.q.expand(len(x), -1, -1)
        if self.kind == "pooled":
            x = self.attended(asking, x + self.attended(x, x))
        elif self.kind == "thrice":
            x = self.attended(asking, x + self.attended(x, x) + self.attended(x, x[:, :5]))
        else:
            x = self.mixed(torch.cat([self.mixed(asking), self.mixed(x)[:, :3]], 1))
        return self.head(x[:, 0])


def shared(kind: str) -> Checkpoint:
    torch.manual_seed(0)
    return checkpoint_from_module(Shared(kind))


def pixels(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["pooled", "thrice", "mlp"])
def test_first_order_effects_of_shared_layers_equal_small_changes(kind: str) -> None:
    """Compare the effects with outputs of changed models in float64; one output, so that its sign does not matter."""
    model = shared(kind).model
    program, shown = tracing(model).running, pixels(11).double()
    program.graph.double()
    names = ("fc1.weight", "fc2.weight") if kind == "mlp" else ("attn.out_proj.weight", "attn.out_proj.bias")
    change = {name: 1e-6 * torch.randn_like(program.tensor(name)) for name in names}
    moved = copy.deepcopy(program.graph)
    for name, each in change.items():
        moved.get_parameter(name).data += each
    with torch.no_grad():
        exact = program.graph(shown)
        wanted = float((moved(shown) - exact).square().sum() / exact.square().sum())
    assert effects_of_changes(model, shown, [change]) == pytest.approx([wanted], rel=1e-4)


@pytest.mark.parametrize("kind", ["pooled", "mlp"])
def test_budget_reduces_shared_layers_and_closed_loop_names_them(kind: str, tmp_path: Path) -> None:
    dense = shared(kind)
    np.save(tmp_path / "images.npy", pixels(64).numpy())
    images = images_for_model(dense.model, tmp_path / "images.npy")
    moments = calibrate(dense, images, batch_size=16)
    asked = method_from_preset("best", align_head=4, align_hidden=8)
    budget = replace(build_request(ReduceOptions(macs=0.85)), method=asked)
    reduction, plan = reduce_as_asked(dense, moments, budget, images=images)
    assert "of the dense macs used" in plan.decisions[0]
    assert any(site.width < site.width_dense for site in reduction.sites)
    layer = "fc2" if kind == "mlp" else "attn.out_proj"
    share = {"mlp_sparsity": 0.5} if kind == "mlp" else {"attention_sparsity": 0.5}
    said = f"{layer}, a shared layer that the model calls {3 if kind == 'mlp' else 2} times"
    method = method_from_preset("best", align_head=4, align_hidden=8, **share)
    rejects(said, reduce_traced, dense.model, images, method, loop=Loop())
