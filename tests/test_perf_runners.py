"""Runners of modules and ONNX graphs: their outputs, timers, reported devices and refusals."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from ground.errors import Missing
from ground.feeds import Feeds
from perf.runners import onnx as onnx_runner
from perf.runners import onnx_session
from perf.runners.cuda import DeviceBound
from perf.runners.module import ModuleRunner
from perf.runners.onnx import OnnxRunner, onnx_precision
from perf.runners.onnx_session import Provider, require_provider
from perf.runners.protocol import HostBound
from tests.graphs import graph_of
from tests.refusals import rejects, reports_missing

RNG = np.random.default_rng(0)
IMAGES = RNG.standard_normal((3, 3, 4, 4)).astype(np.float32)
FEEDS = {"images": IMAGES}
WEIGHT = RNG.standard_normal((48, 5)).astype(np.float32)


def onnx_file(
    path: Path, *, held: int = TensorProto.FLOAT, input_type: int = TensorProto.FLOAT, batch: str | int = "batch"
) -> Path:
    """Write a graph of logits = images.reshape(B, 48) @ WEIGHT, with weights held in this type."""
    proto = graph_of(
        f"""({TensorProto.DataType.Name(input_type).lower()}[{batch},3,4,4] images) => (float[{batch},5] logits) {{
            flat = Flatten<axis=1>(images)
            typed = Cast<to={held}>(flat)
            product = MatMul(typed, weight)
            logits = Cast<to=1>(product)
        }}""",
        weight=WEIGHT.astype(helper.tensor_dtype_to_np_dtype(held)),
    )
    onnx.save(proto, str(path))
    return path


def module() -> nn.Module:
    linear = nn.Linear(48, 5, bias=False)
    linear.weight.data = torch.from_numpy(WEIGHT.T.copy())
    return nn.Sequential(nn.Flatten(), linear)


def expected() -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return IMAGES.reshape(3, 48).astype(np.float64) @ WEIGHT


@pytest.mark.parametrize(
    ("held", "precision", "rtol", "atol"),
    [(TensorProto.FLOAT, "fp32", 1e-4, 1e-5), (TensorProto.FLOAT16, "fp16", 0.02, 0.05)],
)
def test_onnx_runner_computes_the_graph_and_reports_its_device(
    tmp_path: Path, held: int, precision: str, rtol: float, atol: float
) -> None:
    """FP16 weights on the CPU are reported as computed in FP32."""
    with OnnxRunner(onnx_file(tmp_path / "m.onnx", held=held), threads=1) as runner:
        np.testing.assert_allclose(runner(FEEDS)["logits"], expected(), rtol=rtol, atol=atol)
        told = runner.describe()
        ticks = count(0, 1_000_000)
        laps = runner.bind(FEEDS).laps(3, lambda: next(ticks))
    assert (told["device"], told["provider"]) == ("cpu", "CPUExecutionProvider")
    assert (told["precision"], told["computed_in"]) == (precision, "fp32")
    assert (told["threads"], laps.compute_ms, laps.wall_ms) == (1, (1.0, 1.0, 1.0), 5.0)


def test_precision_is_mixed_without_a_dominant_weight_type(tmp_path: Path) -> None:
    path = onnx_file(tmp_path / "m.onnx", held=TensorProto.FLOAT16)
    proto = onnx.load(str(path))
    proto.graph.initializer.append(numpy_helper.from_array(WEIGHT, "other"))
    onnx.save(proto, str(path))
    assert onnx_precision(path) == "mixed"


@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_onnx_runner_never_falls_back_to_the_cpu(tmp_path: Path, provider: Provider) -> None:
    reports_missing("has no", require_provider, ["CPUExecutionProvider"], provider)


class Session:
    """An ONNX Runtime session that gets the providers in `given`, whatever it asks for."""

    given: tuple[str, ...] = ()
    asked: dict[str, object]

    def __init__(self, path: str, options: object, **asked: object) -> None:
        type(self).asked = asked

    def get_providers(self) -> list[str]:
        return list(self.given)


def stand_in(monkeypatch: pytest.MonkeyPatch, session: Callable[..., object]) -> None:
    """Replace ONNX Runtime by one with every provider, as on a machine with a GPU."""
    errors = dict.fromkeys(
        ("InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NotImplemented", "RuntimeException"), KeyError
    )
    state = SimpleNamespace(onnxruntime_pybind11_state=SimpleNamespace(Fail=RuntimeError, **errors))
    settings: list[tuple[str, str]] = []
    options = SimpleNamespace(add_session_config_entry=lambda *entry: settings.append(entry), settings=settings)
    whole = SimpleNamespace(
        get_available_providers=lambda: list(onnx_session.PROVIDERS.values()),
        SessionOptions=lambda: options,
        InferenceSession=session,
        capi=state,
    )
    for module in (onnx_runner, onnx_session):
        monkeypatch.setattr(module, "import_onnxruntime", lambda: whole)
    monkeypatch.setattr(onnx_runner, "open_stream", lambda: SimpleNamespace(cuda_stream=0))


@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_unavailable_provider_is_missing_without_a_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str
) -> None:
    class OnCpu(Session):
        given = ("CPUExecutionProvider",)

    stand_in(monkeypatch, OnCpu)
    with pytest.raises(Missing, match=r"asked ONNX Runtime for \w+ExecutionProvider and got CPUExecutionProvider"):
        OnnxRunner(onnx_file(tmp_path / "m.onnx"), provider=provider).__enter__()  # type: ignore[arg-type]
    assert OnCpu.asked["enable_fallback"] == 0
    asked: Any = OnCpu.asked["providers"]
    assert [name for name, _ in asked] == [{"cuda": "CUDA", "tensorrt": "Tensorrt"}[provider] + "ExecutionProvider"]


def test_nodes_left_to_the_cpu_are_reported_as_unsupported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: str, options: SimpleNamespace, **asked: object) -> None:
        assert ("session.disable_cpu_ep_fallback", "1") in options.settings
        raise RuntimeError(
            "This session contains graph nodes that are assigned to the default CPU EP, but fallback to CPU EP has "
            "been explicitly disabled by the user."
        )

    stand_in(monkeypatch, refused)
    with pytest.raises(Missing, match="CUDAExecutionProvider, which leaves nodes of this graph to the CPU"):
        OnnxRunner(onnx_file(tmp_path / "m.onnx"), provider="cuda").__enter__()


def test_onnxruntimes_message_for_cpu_fallback_is_recognised() -> None:
    """If the library changed this message, such a graph would be reported as one that can't be loaded."""
    import onnxruntime

    library = next((Path(onnxruntime.__file__).parent / "capi").glob("onnxruntime_pybind11_state*"))
    assert onnx_session.LEFT_TO_CPU.encode() in library.read_bytes()


def test_onnx_runner_refuses_unsupported_graphs(tmp_path: Path) -> None:
    rejects("no such ONNX file", OnnxRunner(tmp_path / "none.onnx").__enter__)
    (tmp_path / "broken.onnx").write_bytes(b"not onnx")
    rejects("expected an ONNX graph", OnnxRunner(tmp_path / "broken.onnx").__enter__)
    half = onnx_file(tmp_path / "half.onnx", input_type=TensorProto.FLOAT16)
    rejects(r"expected inputs .* of float32, int64.* found images: float16", OnnxRunner(half).__enter__)
    rejects("threads", OnnxRunner, tmp_path / "m.onnx", threads=0)
    rejects("need a GPU", OnnxRunner, tmp_path / "m.onnx", cuda_graph=True)


@pytest.mark.parametrize(("precision", "rtol"), [("fp32", 1e-5), ("bf16", 0.1), ("fp16", 0.02)])
def test_module_runner_computes_the_module_without_changing_it(precision: str, rtol: float) -> None:
    mine = module()
    with ModuleRunner(mine, precision=precision) as runner:  # type: ignore[arg-type]
        logits = runner(FEEDS)["logits"]
        told = runner.describe()
        runner.bind(FEEDS).laps(2, lambda: 0)
    np.testing.assert_allclose(logits, expected(), rtol=rtol, atol=0.3 * rtol * 10)
    assert logits.dtype == np.float32
    assert (told["precision"], told["device"], told["mode"], told["clock"]) == (precision, "cpu", "eager", "host")
    assert next(mine.parameters()).dtype == torch.float32
    assert mine.training


def test_module_runner_sets_and_restores_threads() -> None:
    before = torch.get_num_threads()
    with ModuleRunner(module(), threads=1) as runner:
        assert torch.get_num_threads() == 1
        assert runner.describe()["threads"] == 1
    assert torch.get_num_threads() == before


def test_module_runner_never_falls_back_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reports_missing("a GPU was asked for", ModuleRunner(module(), device="cuda").__enter__)
    rejects("need device cuda", ModuleRunner, module(), mode="cuda_graph")


def test_host_timer_excludes_the_reading_of_lost_time() -> None:
    """Reading the clock and each call take 1 ms; reading lost time takes 10 ms, which no call may contain."""
    now = [0]

    def passing(ticks: int) -> Callable[[], int]:
        def step() -> int:
            now[0] += ticks * 1_000_000
            return now[0]

        return step

    def lost_ns() -> int:
        passing(10)()
        return 500_000

    laps = HostBound(passing(1), lambda: nullcontext(lost_ns)).laps(3, passing(1))
    assert (laps.compute_ms, laps.lost_ms) == ((2.0, 2.0, 2.0), (0.5, 0.5, 0.5))
    assert laps.wall_ms == 3 * 3 - 1 + 2 * 10
    assert laps.end_to_end_ms is None


class Tape:
    """A device stream on which stages take time and marks record when they are reached."""

    def __init__(self) -> None:
        self.now_ms, self.waited = 0.0, 0

    def stage(self, ms: float) -> None:
        self.now_ms += ms

    def mark(self) -> "Mark":
        return Mark(self.now_ms)

    def wait(self) -> None:
        self.waited += 1


class Mark:
    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def elapsed_time(self, later: "Mark") -> float:
        return later.at_ms - self.at_ms


@pytest.mark.parametrize("flushed", [False, True])
def test_device_times_are_event_spans_without_the_flush(flushed: bool) -> None:
    tape, host = Tape(), count(0, 1_000_000)
    bound = DeviceBound(
        copy_in=lambda: tape.stage(2.0), launch=lambda: tape.stage(5.0), copy_out=lambda: tape.stage(0.5),
        mark=tape.mark, wait=tape.wait, flush=(lambda: tape.stage(100.0)) if flushed else None,
    )  # fmt: skip
    laps = bound.laps(3, lambda: next(host))
    assert (laps.compute_ms, laps.end_to_end_ms) == ((5.0, 5.0, 5.0), (7.5, 7.5, 7.5))
    assert (laps.enqueue_ms, laps.wall_ms) == (1.0, 2.0)
    assert tape.waited == 1  # one wait for all calls of a block


def session_on_a_gpu(classes: int | str) -> Mock:
    """Return a mock session with two inputs, which records the calls that a GPU session would get."""
    images = SimpleNamespace(name="images", shape=["batch", 3, 4, 4], type="tensor(float)")
    ids = SimpleNamespace(name="ids", shape=["batch", 2], type="tensor(int64)")
    logits = SimpleNamespace(name="logits", shape=["batch", classes], type="tensor(float)")
    session = Mock(**{"get_modelmeta.return_value.custom_metadata_map": {}})
    session.get_inputs.return_value, session.get_outputs.return_value = [images, ids], [logits]
    return session


def test_gpu_runner_binds_addresses_once_and_skips_first_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = Tape()

    def address(shape: tuple[int, ...], at: int) -> SimpleNamespace:
        return SimpleNamespace(shape=shape, data_ptr=lambda: at)

    def bound_to_tape(launch: Callable[[], object], *, flush_l2: bool) -> DeviceBound:
        return DeviceBound(copy_in=lambda: None, launch=launch, copy_out=lambda: None, mark=tape.mark, wait=tape.wait)

    def hold(stream: object, feeds: Feeds, shapes: dict[str, tuple[int, ...]]) -> SimpleNamespace:
        held = {name: address(array.shape, 100 + place) for place, (name, array) in enumerate(feeds.items())}
        out = {name: address(shape, 200) for name, shape in shapes.items()}
        return SimpleNamespace(device_in=held, device_out=out, bound=bound_to_tape)

    monkeypatch.setattr(onnx_runner, "Staging", SimpleNamespace(hold=hold))
    runner, session = OnnxRunner(Path("m.onnx"), provider="cuda"), session_on_a_gpu(5)
    runner._session, runner._stream = session, SimpleNamespace(synchronize=tape.wait)
    runner._set_ports()
    feeds: Feeds = {"ids": np.ones((3, 2), np.int64), **FEEDS}
    bound = runner.bind(feeds)
    assert session.run_with_iobinding.call_count == 3
    bound.laps(4, lambda: 0)
    binding = session.io_binding.return_value
    assert [each.args[0] for each in session.run_with_iobinding.mock_calls] == [binding] * 7
    assert binding.mock_calls == [
        call.bind_input("images", "cuda", 0, np.float32, (3, 3, 4, 4), 100),
        call.bind_input("ids", "cuda", 0, np.int64, (3, 2), 101),
        call.bind_output("logits", "cuda", 0, np.float32, (3, 5), 200),
    ]
    runner._session = session_on_a_gpu("classes")
    rejects(r"logits must be .* fixed sizes behind the batch", runner.bind, feeds)
