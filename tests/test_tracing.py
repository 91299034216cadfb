"""The cache of traced graphs: what it finds again, what it must not take for the same, and what it counts."""

import dataclasses
import inspect
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, fx, nn

from corp_deploy.families.traced_model import exportable
from corp_deploy.store.checkpoint import load_checkpoint, save
from corp_deploy.traced.models.narrowed_model import narrow_model
from export.graph import to_onnx
from export.graph.precision import typed_copy
from tests import graph_keys, tiny, tracing
from tests.graph_keys import NotCacheable, digest
from tests.hf_towers import tower

ROOT = Path(__file__).parents[1]


pytest_plugins = ("pytester",)
TRACE: Callable[..., onnx.ModelProto] = inspect.unwrap(to_onnx._trace)
FACTOR = 2.0


def scaled(x: Tensor) -> Tensor:
    return x * FACTOR


class Mlp(nn.Module):
    """Reads a module's global through a function, an attribute and a weight."""

    def __init__(self, power: float = 2.0) -> None:
        super().__init__()
        self.power, self.linear = power, nn.Linear(3, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape))

    def forward(self, x: Tensor) -> Tensor:
        return scaled(self.linear(x)) ** self.power


def program(constant: float = 0.5) -> fx.GraphModule:
    """A program with a number, a tensor and metadata, whose class is made anew at each call."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    added = graph.call_function(torch.ops.aten.add.Tensor, (x, constant))
    added.meta["sizes"] = (2, 3)
    graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (added, graph.get_attr("table"))))
    return fx.GraphModule({"table": torch.arange(3.0)}, graph)


def key(model: nn.Module, precision: str = "fp32", **others: Any) -> str:
    return digest(typed_copy(model, precision), others)


def reduced(directory: Path) -> nn.Module:
    if not directory.exists():
        dense = tiny.checkpoint()
        model = narrow_model(dense.model, {"blocks.0.mlp": np.arange(100)}, {})
        save(dataclasses.replace(dense, model=model), directory)
    return load_checkpoint(directory).model


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda path: Mlp(), id="module of a test"),
        pytest.param(lambda path: program(), id="program"),
        pytest.param(lambda path: exportable(tiny.checkpoint().model), id="model in memory"),
        pytest.param(lambda path: exportable(reduced(path / "reduced")), id="directory loaded twice"),
        pytest.param(lambda path: tower("ViTModel"), id="model of transformers"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_equal_models_have_equal_keys_and_one_weight_changes_them(
    made: Callable[[Path], nn.Module], precision: str, tmp_path: Path
) -> None:
    first, second = made(tmp_path), made(tmp_path)
    assert key(first, precision) == key(second, precision)
    tensor = next(iter(second.state_dict().values()), None)
    with torch.no_grad():
        (second.get_buffer("table") if tensor is None else tensor).view(-1)[-1] += 1
    assert key(first, precision) != key(second, precision)


def _edited(edit: Callable[[nn.Module], object], make: Callable[[], nn.Module] = Mlp) -> nn.Module:
    model = make()
    edit(model)
    return model


def _hooked(model: nn.Module, factor: float) -> None:
    model.register_forward_hook(lambda _, __, output: output * factor)


def _change_meta(model: nn.Module) -> None:
    assert isinstance(model, fx.GraphModule)
    next(node for node in model.graph.nodes if node.meta).meta["sizes"] = (4, 3)


def _forward(line: str) -> nn.Module:
    """A module whose class is made at run time, with this line in its forward function."""
    space: dict[str, Any] = {}
    exec(f"def forward(self, x):\n    y = x + 1\n    {line}\n    return y", space)
    return type("Made", (nn.Module,), {"forward": space["forward"]})()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Mlp, lambda: Mlp(3.0)),
        (Mlp, lambda: Mlp().double()),
        (Mlp, lambda: Mlp().eval()),
        (Mlp, lambda: _edited(lambda model: model.get_submodule("linear").register_parameter("bias", None))),
        (
            Mlp,
            lambda: _edited(
                lambda model: model.register_module("linear", nn.Sequential(model.get_submodule("linear")))
            ),
        ),
        (Mlp, lambda: _edited(lambda model: _hooked(model, 2.0))),
        (lambda: _edited(lambda model: _hooked(model, 3.0)), lambda: _edited(lambda model: _hooked(model, 2.0))),
        (program, lambda: program(0.25)),
        (program, lambda: _edited(_change_meta, program)),
        (lambda: _forward("y = y * 2"), lambda: _forward("y = y * 3")),
        (lambda: _forward("y = y * 2"), lambda: _forward("y = y.relu()")),
        (lambda: _forward("f = lambda z: z * 2; y = f(y)"), lambda: _forward("f = lambda z: z * 3; y = f(y)")),
        (lambda: tower("ViTModel"), lambda: tower("ViTModel", hidden_act="relu")),
        (lambda: tower("ViTModel"), lambda: tower("ViTModel", layer_norm_eps=0.1)),
    ],
)
def test_models_that_differ_have_different_keys(one: Callable[[], nn.Module], other: Callable[[], nn.Module]) -> None:
    assert digest(one()) == digest(one())
    assert digest(one()) != digest(other())


@pytest.mark.parametrize("changed", ["a global", "a function", "a method", "the tracer"])
def test_code_in_the_process_is_part_of_the_key(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants and patches change what files don't show."""
    before = digest(Mlp(), TRACE)
    match changed:
        case "a global":
            monkeypatch.setitem(scaled.__globals__, "FACTOR", 3.0)
        case "a function":
            monkeypatch.setattr(scaled, "__code__", (lambda x: x + FACTOR).__code__)
        case "a method":
            monkeypatch.setattr(Mlp, "forward", lambda self, x: self.linear(x))
        case "the tracer":
            monkeypatch.setattr(to_onnx, "BATCH", "n")
    assert digest(Mlp(), TRACE) != before


def test_shared_tensors_strides_and_dtypes_are_part_of_the_key() -> None:
    x = torch.zeros(2, 2)
    variants: list[Any] = [
        [x, x], [x, x.clone()], [x, x.view(2, 2)], [x, x.t()], [x, x.to(torch.bfloat16)], [1], [1.0], [True], ["1"],
        [0.0], [-0.0], (1,), {1: 2}, {"a": 1, "b": 2}, {"b": 2, "a": 1}, [[1], 2], [[1, 2]],
        np.zeros(2), np.zeros(2, "i4"),
    ]  # fmt: skip
    assert len(set(map(digest, variants))) == len(variants)
    assert digest({1, 2, 3}) == digest({3, 2, 1})


@pytest.mark.parametrize("made", [threading.Lock, lambda: (number for number in range(1)), lambda: tiny])
def test_unreadable_objects_have_no_key(made: Callable[[], object]) -> None:
    with pytest.raises(NotCacheable, match=r"lock|generator|module tests\.tiny"):
        digest(_edited(lambda model: setattr(model, "extra", made())))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tracing, "counts", type(tracing.counts)())
    return lambda: dict(tracing.counts)


@pytest.mark.slow("graph")
def test_second_call_reads_the_cached_graph(counted: Callable[[], dict[str, int]], tmp_path: Path) -> None:
    trace = tracing.cached(TRACE, tmp_path)

    def traced(model: nn.Module, rows: int = 2, **options: Any) -> onnx.ModelProto:
        with torch.no_grad():
            return trace(model, {"x": torch.ones(rows, 3)}, 1, **{"opset": 20, "dynamic": True, **options})

    first = traced(typed_copy(Mlp(), "fp32"))
    assert traced(typed_copy(Mlp(), "fp32")) == first
    assert counted() == {"traced": 1, "from the cache": 1}
    others = [
        traced(typed_copy(Mlp(3.0), "fp32")), traced(typed_copy(Mlp(), "fp16")), traced(Mlp().eval(), rows=3),
        traced(Mlp().eval(), opset=21), traced(Mlp().eval(), dynamic=False),
    ]  # fmt: skip
    assert counted() == {"traced": 6, "from the cache": 1}
    assert first not in others[:2] + others[3:]
    for _ in range(2):
        traced(_edited(lambda model: setattr(model, "lock", threading.Lock())).eval())
    assert counted() == {"traced": 8, "from the cache": 1, "not cacheable: lock": 2}
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".onnx"]


def test_module_attributes_are_part_of_the_key() -> None:
    def of(value: float) -> FunctionType:
        space: dict[str, Any] = {"tiny": tiny}
        exec("def forward(x):\n    return tiny.relative(x, x) * VALUE", space | {"VALUE": value}, space)
        function: FunctionType = space["forward"]
        return function

    contents = graph_keys._Contents()
    contents.add(of(1.0))
    assert tiny.relative in contents.alive
    assert tiny.images not in contents.alive


def test_operators_without_known_code_have_no_key() -> None:
    with pytest.raises(NotCacheable, match="operator mine"):
        digest(_forward("import torch; y = torch.ops.mine.double(y)"))


@pytest.mark.slow("process")
def test_keys_are_the_same_in_other_processes() -> None:
    code = "from tests.test_tracing import *; print(key(Mlp(), 'fp16'), digest(program(), TRACE))"
    mine = f"{key(Mlp(), 'fp16')} {digest(program(), TRACE)}"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip() == mine


def test_random_state_is_equal_after_a_hit_and_a_trace(tmp_path: Path) -> None:
    def draw(model: nn.Module) -> onnx.ModelProto:
        torch.rand(3)
        return onnx.ModelProto()

    trace, drawn = tracing.cached(draw, tmp_path), list[Tensor]()
    for _ in range(2):
        torch.manual_seed(0)
        trace(program())
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


def test_failed_traces_fail_again(counted: Callable[[], dict[str, int]], tmp_path: Path) -> None:
    def refuse(model: nn.Module) -> onnx.ModelProto:
        raise ValueError("refused")

    trace = tracing.cached(refuse, tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match="refused"):
            trace(Mlp())
    assert counted() == {"traced": 2}


def test_old_graphs_are_deleted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "old.onnx").write_bytes(b"")
    monkeypatch.setattr(to_onnx, "_trace", to_onnx._trace)
    tracing.cache_graphs(tmp_path)
    assert (tmp_path / "old.onnx").exists()
    monkeypatch.setattr(tracing, "UNUSED_S", -60.0)
    tracing.cache_graphs(tmp_path)
    assert not (tmp_path / "old.onnx").exists()
