"""Equal architectures share a traced program within a process, and nothing else of two loads is shared."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from timm import layers
from torch import nn

from corp_deploy.families import family
from corp_deploy.families.family import MOST_PROGRAMS, dense_model, share_program_, with_outputs
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.outputs import NamedOutputs
from corp_deploy.store.checkpoint import load_checkpoint, save
from corp_deploy.traced.models import module
from corp_deploy.traced.models.module import TracedModule, Tracing, tracing
from corp_deploy.traced.models.narrowed_model import at_widths
from corp_deploy.traced.programs import tracing as tracing_of_models
from tests import small_models, tiny

NARROW = {"blocks.0.mlp": 40, "blocks.1.attn.qk": 24}


@pytest.fixture(autouse=True)
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The classes that were traced since the test began."""
    traced, trace = list[str](), tracing_of_models.trace

    def counted(model: nn.Module, inputs: Any) -> Any:
        traced.append(type(model).__name__)
        return trace(model, inputs)

    monkeypatch.setattr(module, "trace", counted)
    family._traced.cache_clear()
    yield traced
    family._traced.cache_clear()


@pytest.fixture
def reduced(tmp_path: Path) -> Path:
    """The directory of a reduced model."""
    dense = tiny.checkpoint()
    save(replace(dense, model=at_widths(dense.model, NARROW)), tmp_path / "reduced")
    return tmp_path / "reduced"


def shared(architecture: Architecture = tiny.ARCHITECTURE, outputs: NamedOutputs | None = None) -> Tracing:
    """The program of a model that was just built."""
    with torch.device("meta"):
        model = with_outputs(dense_model(architecture), outputs)
    assert isinstance(model, TracedModule)
    share_program_(model, architecture)
    return tracing(model)


def with_arguments(**kwargs: Any) -> Architecture:
    return replace(tiny.ARCHITECTURE, kwargs={**tiny.ARCHITECTURE.kwargs, **kwargs})


def test_equal_architectures_are_traced_once(reduced: Path, traces: list[str]) -> None:
    traces.clear()
    for _ in range(3):
        load_checkpoint(reduced)
    assert traces == ["VisionTransformer"]


def test_another_reduction_of_an_architecture_shares_its_program(
    reduced: Path, tmp_path: Path, traces: list[str]
) -> None:
    dense = tiny.checkpoint(1)
    save(replace(dense, model=at_widths(dense.model, {"blocks.1.mlp": 24})), tmp_path / "narrower")
    traces.clear()
    models = [load_checkpoint(each).model for each in (reduced, tmp_path / "narrower")]
    assert len(traces) == 1
    assert [model.get_parameter("blocks.1.mlp.fc1.weight").shape[0] for model in models] == [192, 24]


@pytest.mark.parametrize(
    "other", [with_arguments(img_size=48), with_arguments(depth=3), with_arguments(num_classes=8)], ids=str
)
def test_other_arguments_are_traced_separately(other: Architecture, traces: list[str]) -> None:
    assert shared().program is not shared(other).program
    assert len(traces) == 2


def test_other_outputs_are_traced_separately(traces: list[str]) -> None:
    assert shared().program is not shared(outputs=NamedOutputs(("logits", "block0_class"))).program
    assert len(traces) == 2


def test_another_setting_of_timm_is_traced_separately(traces: list[str]) -> None:
    before = layers.use_fused_attn()
    fused = [str(node.target) for node in shared().program.nodes]
    layers.set_fused_attn(not before)
    try:
        other = [str(node.target) for node in shared().program.nodes]
    finally:
        layers.set_fused_attn(bool(before))
    assert fused != other
    assert len(traces) == 2


def test_user_registered_models_are_traced_at_every_load(traces: list[str]) -> None:
    architecture = Architecture(name=small_models.NAMES[0], kwargs={"num_classes": 7})
    assert shared(architecture).program is not shared(architecture).program
    assert len(traces) == 2


def test_model_with_weights_is_not_shared(traces: list[str]) -> None:
    for _ in range(2):
        checkpoint = tiny.checkpoint()
        assert isinstance(checkpoint.model, TracedModule)
        share_program_(checkpoint.model, checkpoint.architecture)
        tracing(checkpoint.model)
    assert len(traces) == 2


def test_changing_a_loaded_model_does_not_affect_the_next_load(reduced: Path) -> None:
    images = torch.from_numpy(tiny.images(2))
    changed = load_checkpoint(reduced).model
    with torch.no_grad():
        expected = changed(images)
        for parameter in changed.parameters():
            parameter.zero_()
    graph: Any = changed._graph
    for node in graph.nodes:
        node.meta.clear()
    linear = next(node for node in graph.nodes if node.target is torch.ops.aten.linear.default)
    linear.replace_all_uses_with(linear.args[0])
    changed.blocks = nn.Identity()
    with torch.no_grad():
        assert torch.equal(load_checkpoint(reduced).model(images), expected)


def test_few_programs_are_cached_without_weights() -> None:
    first = weakref.ref(shared(with_arguments(num_classes=20)).program.graph)
    for classes in range(MOST_PROGRAMS):
        graph = shared(with_arguments(num_classes=classes + 1)).program.graph
        assert all(each.is_meta for each in (*graph.parameters(), *graph.buffers()))
    gc.collect()
    assert first() is None
    assert family._traced.cache_info().currsize == MOST_PROGRAMS


def test_default_dtype_is_part_of_the_key() -> None:
    with torch.device("meta"):
        model = dense_model(tiny.ARCHITECTURE)
    assert isinstance(model, TracedModule)
    key = family._key(model, tiny.ARCHITECTURE)
    torch.set_default_dtype(torch.float64)
    try:
        other = family._key(model, tiny.ARCHITECTURE)
    finally:
        torch.set_default_dtype(torch.float32)
    assert key is not None
    assert key == family._key(model, tiny.ARCHITECTURE) != other


def test_sites_are_found_once_per_program() -> None:
    one, other = shared(), shared()
    assert one is not other
    assert one.analysis is other.analysis
    assert one.proved is not other.proved


def test_two_loads_share_no_memory(reduced: Path) -> None:
    one, other = (load_checkpoint(reduced).model for _ in range(2))
    tensors = [{**dict(model.named_parameters()), **dict(model.named_buffers())} for model in (one, other)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, each in tensors[0].items():
        assert each.untyped_storage().data_ptr() != tensors[1][name].untyped_storage().data_ptr(), name
    assert not set(map(id, one.modules())) & set(map(id, other.modules()))
