"""The OpenVINO runner computes what the graph says, in the precision asked for, or refuses."""

import ctypes
import gc
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ground.errors import BadInput, Missing
from perf.runners import openvino as openvino_runner
from perf.runners.openvino import CompiledSettings, OpenVinoRunner, shared_core
from tests.refusals import rejects, reports_missing
from tests.test_perf_runners import FEEDS, IMAGES, expected, onnx_file


@pytest.fixture
def openvino() -> Any:
    return pytest.importorskip("openvino", reason="openvino is not installed")


def relative_error(got: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(got - expected()) / np.linalg.norm(expected()))


def cpu_has(precision: str) -> bool:
    return precision in shared_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


@pytest.mark.usefixtures("openvino")
def test_fp32_graph_is_computed_in_fp32_on_every_cpu(tmp_path: Path) -> None:
    with OpenVinoRunner(onnx_file(tmp_path / "m.onnx"), threads=1) as runner:
        assert relative_error(runner(FEEDS)["logits"]) < 1e-6
        told = runner.describe()
        ticks = count(0, 1_000_000)
        assert runner.bind(FEEDS).laps(3, lambda: next(ticks)).compute_ms == (1.0, 1.0, 1.0)
    assert (told["backend"], told["precision"], told["computed_in"]) == ("openvino", "fp32", "fp32")
    assert (told["threads"], told["openvino_streams"], told["execution_mode"]) == (1, 1, "ACCURACY")
    assert (told["pinning"], told["device"], told["clock"]) == (False, "cpu", "host")


@pytest.mark.usefixtures("openvino")
def test_fp16_weights_are_computed_in_fp32_and_reported(tmp_path: Path) -> None:
    with OpenVinoRunner(onnx_file(tmp_path / "m.onnx", held=TensorProto.FLOAT16), arithmetic="fp32") as runner:
        told = runner.describe()
        assert (told["precision"], told["computed_in"]) == ("fp16", "fp32")
        assert 1e-6 < relative_error(runner(FEEDS)["logits"]) < 2e-3


def test_bf16_runs_in_bf16_or_is_refused_without_cpu_support(openvino: Any, tmp_path: Path) -> None:
    runner = OpenVinoRunner(onnx_file(tmp_path / "m.onnx"), arithmetic="bf16")
    if not cpu_has("BF16"):
        reports_missing("asked OpenVINO for bf16", runner.__enter__)
        return
    with runner:
        assert runner.describe()["computed_in"] == "bf16"
        assert 1e-4 < relative_error(runner(FEEDS)["logits"]) < 2e-2


def test_bf16_graph_is_not_reported_as_fp32(openvino: Any, tmp_path: Path) -> None:
    """OpenVINO reports an f32 hint and still computes layers with BF16 weights in BF16."""
    if not cpu_has("BF16"):
        pytest.skip("this CPU has no BF16")
    path = onnx_file(tmp_path / "m.onnx", held=TensorProto.BFLOAT16)
    with OpenVinoRunner(path) as runner:
        told = runner.describe()
        assert (told["precision"], told["inference_precision"], told["computed_in"]) == ("bf16", "fp32", "bf16")
    with pytest.raises(
        Missing, match="asked OpenVINO for fp32, and it computes products in bf16, as the graph is typed"
    ):
        OpenVinoRunner(path, arithmetic="fp32").__enter__()


def test_fp16_is_refused_on_a_cpu_that_would_compute_bf16(openvino: Any, tmp_path: Path) -> None:
    if cpu_has("FP16"):
        pytest.skip("this CPU has FP16")
    with pytest.raises(Missing, match="asked OpenVINO for fp16 and got"):
        OpenVinoRunner(onnx_file(tmp_path / "m.onnx"), arithmetic="fp16").__enter__()


def stack_of_signals() -> int:
    """Return the address of this thread's signal stack, 0 if it has none."""

    class Stack(ctypes.Structure):
        _fields_ = (("place", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))

    stack = Stack()
    assert ctypes.CDLL(None).sigaltstack(None, ctypes.byref(stack)) == 0
    return stack.place or 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc/self/maps")
@pytest.mark.usefixtures("openvino")
def test_two_graphs_leave_the_signal_stack_intact(tmp_path: Path) -> None:
    path = onnx_file(tmp_path / "m.onnx")
    first, second = OpenVinoRunner(path), OpenVinoRunner(path)
    first.__enter__(), second.__enter__()
    for each in (first, second):
        each.__exit__(None, None, None)
        gc.collect()
    maps = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    place = stack_of_signals()
    assert place == 0 or any(int(low, 16) <= place < int(high, 16) for low, high in maps)


@pytest.mark.usefixtures("openvino")
def test_threads_beyond_the_cores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Missing, match="asked OpenVINO for 1000 threads and got"):
        OpenVinoRunner(onnx_file(tmp_path / "m.onnx"), threads=1000).__enter__()


@pytest.mark.usefixtures("openvino")
def test_unsupported_graphs_are_refused(tmp_path: Path) -> None:
    rejects("no such ONNX file", OpenVinoRunner(tmp_path / "none.onnx").__enter__)
    (tmp_path / "broken.onnx").write_bytes(b"not onnx")
    rejects(r"broken\.onnx: a text, .* expected an ONNX graph", OpenVinoRunner(tmp_path / "broken.onnx").__enter__)
    rejects("threads: at least 1, got 0", OpenVinoRunner, tmp_path / "m.onnx", threads=0)
    unknown = onnx.load(str(onnx_file(tmp_path / "m.onnx")))
    unknown.graph.node[2].op_type = "Unheard"
    onnx.save(unknown, str(tmp_path / "unknown.onnx"))
    rejects(r"unknown\.onnx: OpenVINO cannot load it: .*Unheard", OpenVinoRunner(tmp_path / "unknown.onnx").__enter__)


@pytest.mark.usefixtures("openvino")
def test_invalid_graph_never_reaches_openvino(tmp_path: Path) -> None:
    """A convolution without inputs would make OpenVINO end the process."""
    broken = onnx.load(str(onnx_file(tmp_path / "m.onnx")))
    broken.graph.node.append(helper.make_node("Conv", [], ["z"], "c"))
    onnx.save(broken, str(tmp_path / "m.onnx"))
    with pytest.raises(BadInput, match=r"m.onnx: OpenVINO cannot load it: not valid: .* export it again"):
        OpenVinoRunner(tmp_path / "m.onnx").__enter__()


@pytest.mark.usefixtures("openvino")
def test_fixed_batch_graph_refuses_other_batches(tmp_path: Path) -> None:
    with OpenVinoRunner(onnx_file(tmp_path / "m.onnx", batch=3)) as runner:
        assert runner.fixed_batch == 3
        assert relative_error(runner(FEEDS)["logits"]) < 1e-6
        rejects("batch", runner, {"images": IMAGES[:2]})


def test_missing_openvino_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "openvino", None)
    with pytest.raises(Missing, match=r"openvino is not installed; pip install 'corp-deploy\[openvino\]'"):
        OpenVinoRunner(onnx_file(tmp_path / "m.onnx")).__enter__()


TOLD = CompiledSettings(products=("fp32",), hint="fp32", execution_mode="ACCURACY", threads=2, streams=1, pinning=False)


@pytest.mark.parametrize(
    ("changes", "arithmetic", "threads", "said"),
    [
        ({}, "fp32", 2, ""),
        ({}, None, None, ""),
        ({"products": ("bf16", "fp32")}, None, None, ""),
        ({"products": ("fp32", "int8")}, "fp32", None, ""),
        ({"products": ("bf16", "fp32"), "hint": "bf16"}, "bf16", None, ""),
        ({"products": ("bf16",), "hint": "bf16"}, "fp32", None, "asked OpenVINO for fp32 and got bf16"),
        ({"products": ("bf16", "fp32")}, "fp32", None, "computes products in bf16 and fp32"),
        ({"hint": "bf16"}, "bf16", None, "computes products in fp32"),
        ({"products": ("bf16",), "hint": "bf16"}, "fp16", None, "asked OpenVINO for fp16 and got bf16"),
        ({}, "fp32", 3, "asked OpenVINO for 3 threads and got 2"),
        ({"execution_mode": "PERFORMANCE"}, "fp32", None, "execution mode ACCURACY and got PERFORMANCE"),
    ],
)
def test_runtime_precision_that_differs_from_the_request_is_an_error(
    changes: dict[str, Any], arithmetic: Any, threads: int | None, said: str
) -> None:
    if not said:
        replace(TOLD, **changes).require(arithmetic, threads)
        return
    reports_missing(said, replace(TOLD, **changes).require, arithmetic, threads)


def test_out_of_memory_is_not_blamed_on_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("std::bad_alloc: out of memory")

    monkeypatch.setattr(openvino_runner, "shared_core", lambda: SimpleNamespace(compile_model=full))
    monkeypatch.setattr(openvino_runner, "import_openvino", SimpleNamespace)
    with pytest.raises(RuntimeError, match="out of memory"):
        OpenVinoRunner(onnx_file(tmp_path / "m.onnx")).__enter__()
