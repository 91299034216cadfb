"""Recording a model's calls gives a program for any batch size, or refuses the model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from corp_deploy.traced.programs.program import Program, sizes_at_one
from corp_deploy.traced.programs.recording import record_graph
from corp_deploy.traced.programs.sizes import BatchAffineSize, BatchDependentProgram, size_from_batches
from corp_deploy.traced.programs.tracing import trace
from tests import traced_models as own

Forward = Callable[[Any, Tensor], Any]


class Does(nn.Module):
    """A model with a layer and a buffer that runs this function."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.does, self.layer = forward, nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(4))
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        return self.does(self, x)


def cached(model: Any, x: Tensor) -> Tensor:
    """Compute a table in the first call and keep it."""
    if model.cache is None:
        model.cache = torch.arange(4.0, device=x.device)
    return x * model.cache


def in_windows(_: nn.Module, x: Tensor) -> Tensor:
    """Split each image into two windows and append one more window."""
    apart = x.reshape(len(x) * 2, 2)
    return torch.cat((apart, torch.zeros(1, 2, device=x.device)))


def changed_in_place(model: Any, x: Tensor) -> Tensor:
    y = model.layer(x)
    y += 1
    return F.relu(y, inplace=True) * y


def part_changed(model: Any, x: Tensor) -> Tensor:
    """Change a part of a tensor in place whose whole isn't read again."""
    return model.layer(x)[:, :2].mul_(3)


def seen_through_a_part(model: Any, x: Tensor) -> Tensor:
    y = model.layer(x)
    y[:, 1:][:, 0] = 7
    y[:, :2] += x[:, 2:]
    return y * 2


def seen_through_another(model: Any, x: Tensor) -> Tensor:
    y = model.layer(x)
    half = y.view(-1, 2)
    y[:, 0] = 7
    return half * 2


TOLD: dict[str, Forward] = {
    "numbers": lambda m, x: x + x.new_tensor([1.0, 2, 3, 4]) * torch.tensor([0.0, 1, 0, 1], device=x.device),
    "made": lambda m, x: x + torch.arange(4, device=x.device) + torch.eye(4)[0].to(x) + torch.ones_like(x),
    "of the batch": lambda m, x: torch.cat((m.table.expand(x.shape[0], 4), x.new_zeros(x.shape[0], 2)), 1),
    "windows": in_windows, "cached": cached, "in place": changed_in_place, "a part": part_changed,
    "data": lambda m, x: F.linear(x, m.layer.weight.data), "a whole behind a part": seen_through_a_part,
    "several": lambda m, x: {"parts": x.split(1, 1)[1:], "most": x.max(1), "none": None},
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_recorded_program_equals_the_model_at_any_batch(name: str) -> None:
    model = Does(TOLD[name]).eval()
    graph = record_graph(model, (torch.randn(2, 4),))
    for batch in (1, 3, 7):
        x = torch.randn(batch, 4)
        with torch.no_grad():
            torch.testing.assert_close(graph(x.clone()), model(x))
    assert all(each.data_ptr() == graph.get_parameter(key).data_ptr() for key, each in used(model, graph))


@pytest.mark.parametrize("name", ["meta", "graph", "code"])
def test_module_may_have_the_name_of_a_graph_attribute(name: str) -> None:
    model = Does(lambda m, x: getattr(m, name)(m.layer(x))).eval()
    model.add_module(name, nn.Linear(4, 4))
    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(record_graph(model, (torch.randn(2, 4),))(x), model(x))


def test_distinct_modules_are_never_joined() -> None:
    model = Does(lambda m, x: m.meta(x) + m.meta_(x)).eval()
    model.add_module("meta", nn.Linear(4, 4))
    model.add_module("meta_", nn.Linear(4, 4))
    with pytest.raises(BatchDependentProgram, match=r"two tensors that a graph would both name meta_.weight"):
        record_graph(model, (torch.randn(2, 4),))


def used(model: nn.Module, graph: fx.GraphModule) -> list[tuple[str, Tensor]]:
    """Return the parameters of the model that its graph has too."""
    has = {name for name, _ in graph.named_parameters()}
    return [(name, each) for name, each in model.named_parameters() if name in has]


def cached_parts(model: Any, x: Tensor) -> Tensor:
    """Write the table part by part in the first call."""
    if model.cache is None:
        model.cache = torch.zeros(4)
        model.cache[1:3] = 5
    return x * model.cache


@pytest.mark.parametrize("forward", [cached, cached_parts])
def test_tracing_leaves_the_model_unchanged(forward: Forward) -> None:
    model, x = Does(forward).eval(), torch.randn(3, 4)
    program = trace(model, [torch.randn(2, 4)])
    assert model.cache is None
    torch.testing.assert_close(program.graph(x), model(x))


NOT_TOLD: dict[str, tuple[Forward, str]] = {
    "half of the batch": (lambda m, x: x[: len(x) // 2], "at a batch of 2"),
    "pairs of images": (lambda m, x: x.new_zeros(len(x) ** 2), "at a batch of 2"),
    "less than the batch": (lambda m, x: x.new_zeros(len(x) - 1), "at a batch of 2"),
    "image by image": (lambda m, x: torch.stack([each * 2 for each in x]), "calls at one"),
    "a part behind a part": (seen_through_another, "changed in place"),
    "its input": (lambda m, x: x.mul_(2), "constant is changed in place"),
    "its buffer": (lambda m, x: x + m.table.add_(1), "constant is changed in place"),
    "a share": (lambda m, x: x / len(x) * (1 / len(x)), "0.5 at one batch size, 0.2"),
}


@pytest.mark.parametrize("name", NOT_TOLD)
def test_batch_dependent_program_is_refused(name: str) -> None:
    forward, reason = NOT_TOLD[name]
    with pytest.raises(BatchDependentProgram, match=reason):
        record_graph(Does(forward).eval(), (torch.randn(2, 4),))


def test_data_dependent_model_is_reported() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        record_graph(Does(lambda m, x: x if bool(x.sum() > 0) else -x).eval(), (torch.randn(2, 4),))


def test_models_that_recording_refuses_are_exported_by_torch() -> None:
    model = Does(seen_through_another).eval()
    program = trace(model, [torch.randn(2, 4)])
    x = torch.randn(3, 4)
    assert program.any_batch
    torch.testing.assert_close(program.graph(x.clone()), model(x))


def test_sizes_record_the_batch_dimension() -> None:
    graph = record_graph(Does(in_windows).eval(), (torch.randn(2, 4),))
    sizes = {node.name: node.meta["sizes"] for node in graph.graph.nodes if node.op != "output"}
    assert (sizes["x"], sizes["reshape"], sizes["cat"]) == (
        (BatchAffineSize(1), 4),
        (BatchAffineSize(2), 2),
        (BatchAffineSize(2, 1), 2),
    )
    assert sizes_at_one(next(node for node in graph.graph.nodes if node.name == "cat")) == (3, 2)
    assert size_from_batches(8, 8) == 8


def test_calls_record_their_module() -> None:
    torch.manual_seed(0)
    program: Program = trace(own.Nano(), (torch.randint(0, 20, (2, own.TOKENS)),))
    stacks = [list(node.meta["nn_module_stack"].values()) for node in program.nodes if node.name == "linear_1"]
    assert [path for path, _ in stacks[0]] == ["", "attn", "attn.body", "attn.body.c_proj"]
    assert stacks[0][-1][1] == "torch.nn.modules.linear.Linear"


def test_shared_weight_is_recorded_once() -> None:
    model = own.Nano().eval()
    graph = record_graph(model, (torch.randint(0, 20, (2, own.TOKENS)),))
    names = [str(node.target) for node in graph.graph.nodes if node.op == "get_attr"]
    assert names.count("lm_head.weight") == 1
    assert "wte.weight" not in names


class Lifted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unsqueeze_(1)


def test_model_that_changes_shapes_in_place_does_not_affect_others() -> None:
    """The sizes that equal calls give are cached for all models of a process."""
    for model, dims in ((Lifted(4, 4), 3), (nn.Linear(4, 4), 2), (Lifted(4, 4), 3)):
        given = trace(model, [torch.zeros(2, 4)]).output.all_input_nodes[0]
        assert len(given.meta["sizes"]) == dims
