"""The engine runner on a fake TensorRT; host memory stands in for Staging and CUDA graphs, so no GPU is needed."""

from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ground.errors import BadInput
from ground.feeds import Feeds, Outputs
from ground.ports import Port
from perf.runners import engine as engine_runner
from perf.runners.cuda import DeviceBound
from perf.runners.engine import EngineRunner
from tests.refusals import rejects, reports_missing

IMAGES = np.arange(2 * 3 * 2 * 2, dtype=np.float32).reshape(2, 3, 2, 2)
FEEDS = {"images": IMAGES}
IDS = np.array([[1, 2], [3, 4]], dtype=np.int64)


@dataclass
class FakeContext:
    """A context that writes the sum of each item's inputs into every output, through tensor addresses."""

    memory: dict[int, Any]
    inputs: tuple[str, ...] = ("images",)
    outputs: tuple[str, ...] = ("logits",)
    addresses: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    streams: list[int] = field(default_factory=list)
    config: Any = None
    enqueues: bool = True
    takes_addresses: bool = True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return name in self.inputs

    def get_tensor_shape(self, name: str) -> tuple[int, int]:
        assert name in self.outputs
        return (self.shapes[self.inputs[0]][0], 1)

    def set_tensor_address(self, name: str, pointer: int) -> bool:
        self.addresses[name] = pointer
        return self.takes_addresses

    def execute_async_v3(self, stream: int) -> bool:
        self.streams.append(stream)
        sources = [self.memory[self.addresses[name]] for name in self.inputs]
        for place, name in enumerate(self.outputs):
            total = sum(source.reshape(len(source), -1).sum(axis=1, keepdims=True) for source in sources)
            self.memory[self.addresses[name]][:] = total * (place + 1)
        return self.enqueues


@dataclass
class FakeEngine:
    memory: dict[int, Any]
    contexts: list[FakeContext] = field(default_factory=list)
    dtype: str = "float32"
    tensors: tuple[str, ...] = ("images", "logits")
    out_of_memory: bool = False
    takes_addresses: bool = True

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(name for name in self.tensors if name in ("images", "ids"))

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(name for name in self.tensors if name not in self.inputs)

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return self.tensors[index]

    def get_tensor_mode(self, name: str) -> str:
        return "input" if name in self.inputs else "output"

    def get_tensor_dtype(self, name: str) -> str:
        return "int64" if name == "ids" else self.dtype

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return {"images": (-1, 3, 2, 2), "ids": (-1, 2), "features": (-1, 2, 1)}.get(name, (-1, 1))

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        return [(batch, *self.get_tensor_shape(name)[1:]) for batch in (1, 2, 4)]

    def create_runtime_config(self) -> Any:
        return SimpleNamespace(dynamic_shapes_kernel_specialization_strategy="lazy")

    def create_execution_context(self, config: Any = None) -> FakeContext | None:
        if self.out_of_memory:
            return None
        context = FakeContext(self.memory, self.inputs, self.outputs, config=config)
        self.contexts.append(replace(context, takes_addresses=self.takes_addresses))
        return self.contexts[-1]


class FakeLogger:
    Severity = SimpleNamespace(ERROR="error", INTERNAL_ERROR="internal", WARNING="warning")


def fake_trt(engine: FakeEngine | None, name: str = "tensorrt") -> Any:
    class Runtime:
        def __init__(self, logger: Any) -> None:
            self.logger = logger

        def deserialize_cuda_engine(self, plan: bytes) -> FakeEngine | None:
            self.logger.log("warning", "slow")
            self.logger.log("error", "version tag does not match")
            return engine

    return SimpleNamespace(
        __name__=name, __version__="11.4", ILogger=FakeLogger, Runtime=Runtime,
        TensorIOMode=SimpleNamespace(INPUT="input"), float32="float32", uint8="uint8", int64="int64", int32="int32",
        bool="bool", DynamicShapesKernelSpecializationStrategy=SimpleNamespace(EAGER="eager"),
    )  # fmt: skip


class Address(np.ndarray[Any, Any]):
    """Host memory with the data_ptr of a tensor."""

    def data_ptr(self) -> int:
        return id(self)


class HostStaging:
    def __init__(self, memory: dict[int, Any], feeds: Feeds, shapes: dict[str, tuple[int, ...]]) -> None:
        self.host_in = feeds
        self.device_in = {name: np.zeros_like(array).view(Address) for name, array in feeds.items()}
        self.device_out = {name: np.zeros(shape, np.float32).view(Address) for name, shape in shapes.items()}
        memory |= {id(each): each for each in (*self.device_in.values(), *self.device_out.values())}

    def run(self, launch: Any) -> Outputs:
        bound = self.bound(launch, flush_l2=False)
        bound.copy_in()
        bound.launch()
        return {name: np.array(array) for name, array in self.device_out.items()}

    def _copy_in(self) -> None:
        for name, array in self.host_in.items():
            np.copyto(self.device_in[name], array)

    def bound(self, launch: Any, *, flush_l2: bool) -> DeviceBound:
        ticks = count()
        mark = lambda: SimpleNamespace(elapsed_time=lambda later: 1.0, at=next(ticks))  # noqa: E731
        return DeviceBound(copy_in=self._copy_in, launch=launch, copy_out=lambda: None, mark=mark, wait=lambda: None)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Return a fake engine on what the runner takes for a machine with a GPU and TensorRT."""
    memory: dict[int, Any] = {}
    engine = FakeEngine(memory)
    stream = SimpleNamespace(cuda_stream=77)
    hold = lambda stream, feeds, shapes, unread: HostStaging(memory, feeds, shapes)  # noqa: E731
    monkeypatch.setattr(engine_runner, "_tensorrt", lambda backend: fake_trt(engine, backend))
    monkeypatch.setattr(engine_runner, "require_cuda", lambda: None)
    monkeypatch.setattr(engine_runner, "open_stream", lambda: stream)
    monkeypatch.setattr(engine_runner, "Staging", SimpleNamespace(hold=hold))
    return engine


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "m.plan"
    path.write_bytes(b"plan")
    return path


def test_engine_runs_on_its_own_stream_with_fixed_addresses(engine: FakeEngine, plan: Path) -> None:
    with EngineRunner(plan, precision="fp16", cuda_graph=False) as runner:
        np.testing.assert_allclose(runner(FEEDS)["logits"], IMAGES.reshape(2, -1).sum(axis=1, keepdims=True))
        bound = runner.bind(FEEDS)
        bound.laps(3, lambda: 0)
        told = runner.describe()
    called, timed = engine.contexts
    assert called is not timed
    assert timed.streams == [77, 77, 77]
    assert (told["backend"], told["precision"], told["device"]) == ("tensorrt", "fp16", "cuda")


def test_cuda_graph_is_captured_once_and_replayed(
    engine: FakeEngine, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays = count()
    monkeypatch.setattr(engine_runner, "capture_graph", lambda stream, launch: lambda: next(replays))
    with EngineRunner(plan) as runner:
        runner.bind(FEEDS).laps(4, lambda: 0)
    assert next(replays) == 4
    assert engine.contexts[0].streams == []


def test_rtx_kernels_are_specialised_before_the_first_call(engine: FakeEngine, plan: Path) -> None:
    with EngineRunner(plan, backend="tensorrt_rtx", cuda_graph=False) as runner:
        runner(FEEDS)
    assert engine.contexts[0].config.dynamic_shapes_kernel_specialization_strategy == "eager"
    with EngineRunner(plan, backend="tensorrt", cuda_graph=False) as runner:
        runner(FEEDS)
    assert engine.contexts[1].config is None


def test_a_batch_outside_the_profile_is_refused(engine: FakeEngine, plan: Path) -> None:
    with (
        EngineRunner(plan, cuda_graph=False) as runner,
        pytest.raises(BadInput, match=r"to \[4, 3, 2, 2\], got \[6, 3"),
    ):
        runner({"images": np.repeat(IMAGES, 3, axis=0)})


def loaded(engine: FakeEngine | None, plan: Path) -> EngineRunner:
    runner = EngineRunner(plan)
    runner._trt = fake_trt(engine)
    runner._load(plan.read_bytes())
    return runner


def test_plan_that_does_not_load_reports_tensorrts_message(plan: Path) -> None:
    rejects(r"\(b\) for another GPU.*said: version tag does not match", loaded, None, plan)


def test_fp16_inputs_and_outputs_are_refused(plan: Path) -> None:
    rejects("images: float16", loaded, FakeEngine({}, dtype="float16"), plan)


def test_plan_with_several_tensors_is_fed_and_read_by_name(engine: FakeEngine, plan: Path) -> None:
    engine.tensors = ("images", "ids", "logits", "features")
    with EngineRunner(plan, cuda_graph=False) as runner:
        assert runner.inputs == (Port(name="images", shape=(3, 2, 2)), Port(name="ids", shape=(2,), dtype="int64"))
        roles = [(port.name, port.role) for port in runner.outputs]
        assert roles == [("logits", "logits"), ("features", "feature map")]
        answers = runner({"ids": IDS, "images": IMAGES})
        total = IMAGES.reshape(2, -1).sum(axis=1, keepdims=True) + IDS.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(answers["logits"], total)
        np.testing.assert_allclose(answers["features"], 2 * total)
        assert engine.contexts[0].shapes == {"images": (2, 3, 2, 2), "ids": (2, 2)}
        with pytest.raises(BadInput, match=r"m.plan: takes ids as int64, got float32; got 2 of images, 1 of ids"):
            runner({"images": IMAGES, "ids": IDS[:1].astype(np.float32)})


def test_failed_context_allocation_is_out_of_memory(plan: Path) -> None:
    with pytest.raises(MemoryError):
        loaded(FakeEngine({}, out_of_memory=True), plan)(FEEDS)


def test_refused_tensor_address_fails_the_measurement(engine: FakeEngine, plan: Path) -> None:
    engine.takes_addresses = False
    with EngineRunner(plan) as runner, pytest.raises(RuntimeError, match="refused the address of images"):
        runner.bind(FEEDS)


def test_failed_enqueue_is_not_timed(engine: FakeEngine, plan: Path) -> None:
    with EngineRunner(plan, cuda_graph=False) as runner:
        bound = runner.bind(FEEDS)
        engine.contexts[0].enqueues = False
        with pytest.raises(RuntimeError, match="could not be enqueued"):
            bound.laps(1, lambda: 0)


def test_missing_package_gpu_or_plan_is_named(plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rejects("no such plan", EngineRunner(tmp_path / "none.plan").__enter__)
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", None)
    reports_missing("extra `gpu`", EngineRunner(plan).__enter__)
    monkeypatch.setattr(engine_runner, "_tensorrt", lambda backend: fake_trt(None))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    reports_missing("a GPU was asked for", EngineRunner(plan).__enter__)
