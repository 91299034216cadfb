"""Programs in half precision: modules with odd names or repeated calls, constants and clamps."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from corp_deploy.families import traced_model
from corp_deploy.families.traced_model import trace_model
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.traced.programs.exported import unify_types_
from corp_deploy.traced.programs.tracing import trace
from export.graph.quantised import simulate_quantisation

D, TOKENS = 16, 5


class Named(nn.Module):
    """A module whose parts have names from Python code."""

    def __init__(self) -> None:
        super().__init__()
        self.self, self.output, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.output(self.get_submodule("self")(x).relu()))


class Masked(nn.Module):
    """A layer with a norm that is called twice, scores masked with their type's least number, and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = {"x": (TOKENS, D), "mask": (TOKENS,)}
        self.layer, self.qkv, self.rnn = Named(), nn.Linear(D, 3 * D), nn.LSTM(D, D, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.layer(self.layer(x).tanh())).chunk(3, -1)
        scores = q @ k.mT + (1.0 - mask[:, None]) * torch.finfo(q.dtype).min
        return self.rnn(scores.softmax(-1) @ v)[0]


@pytest.mark.slow("graph")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_constants_of_a_program_have_the_type_of_its_weights(precision: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    architecture = Architecture(name="masked", family="module")
    model = trace_model(Masked().eval(), architecture)
    path = tmp_path / "model.onnx"
    export_checkpoint(Checkpoint(model=model, architecture=architecture, lineage={}), path, precision=precision)
    x, mask = torch.randn(3, TOKENS, D), (torch.arange(TOKENS) < torch.tensor([[2], [5], [4]])).float()
    (given,) = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy(), "mask": mask.numpy()})
    with torch.no_grad():
        expected = model(x, mask).numpy()
    assert np.abs(given - expected).max() < (1e-5 if precision == "fp32" else 5e-3) * np.abs(expected).max()


def test_norm_called_twice_counts_as_two_norms() -> None:
    model = traced_model.exportable(trace_model(Masked().eval(), Architecture(name="masked", family="module")))
    names = [name for name, module in model.named_modules() if type(module).__name__ == "Norm"]
    assert names == ["layer.norm", "layer_norm__again_2"]


def test_program_rounds_like_its_modules() -> None:
    """Simulated INT8 rounds calls of a program as it rounds modules."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 12), nn.GELU(), nn.Linear(12, 4)).eval()
    x = torch.randn(5, 3, 8, 8)
    program = trace(model, [x]).graph
    with torch.no_grad():
        exact = model(x)
        one, other = (simulate_quantisation(each, "int8", lambda run: run(x))(x) for each in (model, program))
    torch.testing.assert_close(one, other)
    error = float((one - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.1, error


def test_clamp_to_the_float32_limit_stays_in_float32() -> None:
    """Other such numbers, as in masks, become the limit of half precision."""
    least = torch.finfo(torch.float32).min

    class Bounded(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.clamp(min=least, max=1.0) + torch.where(x > 0, 0.0, least)

    graph = trace(Bounded().eval(), [torch.ones(2, 3)]).graph
    unify_types_(graph)
    x = torch.full((2, 3), -1e30)
    assert torch.equal(graph(x.abs()), torch.ones(2, 3))
    clamps = [node for node in graph.graph.nodes if "clamp" in str(node.target)]
    assert clamps
    assert all(least in (*node.args, *node.kwargs.values()) for node in clamps)
