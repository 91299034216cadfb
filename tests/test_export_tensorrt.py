"""Building with full TensorRT on a stand-in that has only names of TensorRT 11.4's bindings.

Without a GPU these tests check the calls to the library and how its answers are read, but not the answers.
"""

import enum
import importlib
import json
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from onnx import numpy_helper

from corp_deploy.proof.compatibility import bench_lines, build_priced
from corp_deploy.views.engine import engine_table
from export.engine import build as engine_build
from export.engine.build import Engine, build_engine
from export.engine.options import BatchProfile, BuildOptions
from export.engine.record import record_of_plan
from export.engine.session import Library, open_library
from export.graph.to_onnx import save_onnx
from ground.errors import Missing
from ground.files import write_json
from tests.export_text import INPUTS, write_text_onnx
from tests.export_vit import Vit, export
from tests.refusals import rejects, reports_missing

# Read from tensorrt 11.4.0.106, where `memory_pool_limit` has a getter and a setter.
FLAGS_11_4 = [
    *("DEBUG", "GPU_FALLBACK", "REFIT", "DISABLE_TIMING_CACHE", "EDITABLE_TIMING_CACHE", "TF32", "SPARSE_WEIGHTS"),
    *("SAFETY_SCOPE", "DIRECT_IO", "VERSION_COMPATIBLE", "EXCLUDE_LEAN_RUNTIME", "ERROR_ON_TIMING_CACHE_MISS"),
    *("DISABLE_COMPILATION_CACHE", "STRIP_PLAN", "REFIT_IDENTICAL", "WEIGHT_STREAMING", "REFIT_INDIVIDUAL"),
    *("STRICT_NANS", "MONITOR_MEMORY", "DISTRIBUTIVE_INDEPENDENCE"),
]
NETWORK_FLAGS_11_4 = ["STRONGLY_TYPED", "PREFER_AOT_PYTHON_PLUGINS", "PREFER_JIT_PYTHON_PLUGINS"]
NAMES_11_4 = {
    "IBuilderConfig": {
        *("add_optimization_profile", "builder_optimization_level", "profiling_verbosity", "set_memory_pool_limit"),
        *("get_timing_cache", "set_timing_cache", "create_timing_cache", "hardware_compatibility_level"),
    },
    "OnnxParser": {"parse_from_file"},
    "ICudaEngine": {"create_engine_inspector", "get_device_memory_size_for_profile_v2"},
    "ITimingCache": {"serialize"},
}

Inspected = dict[str, Any]
PROFILES = (BatchProfile(smallest=1, tuned=8, largest=64),)


def inspector_10() -> Inspected:
    """Return TensorRT 10's form: Bindings, tensors with Format/Datatype, nodes joined by a control character."""
    tensor = {"Name": "t", "Location": "Device", "Dimensions": [1], "Format/Datatype": "Row major linear FP16 format"}
    onnx_nodes = "\x1f".join(f"[ONNX Layer: blocks.0.attn/{name}]" for name in ("MatMul", "Softmax", "MatMul_1"))
    fused = {"Name": "_gemm_mha_v2_myl0_5", "LayerType": "kgen", "Inputs": [tensor], "Outputs": [tensor]}
    plain = {"Name": "head", "LayerType": "gemm", "Inputs": [{**tensor, "Format/Datatype": "Float"}], "Outputs": []}
    wait = {"Name": "w", "LayerType": "wait", "Inputs": [], "Outputs": []}
    layers = [{**fused, "TacticName": "x", "Metadata": onnx_nodes}, {**plain, "TacticName": "sm80_gemm"}, wait]
    return {"Layers": layers, "Bindings": ["images", "logits"]}


def inspector_11() -> Inspected:
    """Return TensorRT 11's form: I/O Tensors, tensors with Datatype."""
    content = inspector_10()
    del content["Bindings"]
    for layer in content["Layers"]:
        for tensor in [*layer["Inputs"], *layer["Outputs"]]:
            tensor["Datatype"] = "Half" if "FP16" in tensor.pop("Format/Datatype", "FP16") else "Float"
    ports = [("images", "Input"), ("logits", "Output")]
    return {**content, "I/O Tensors": [{"Name": name, "IOMode": mode, "DataType": "Float"} for name, mode in ports]}


class TimingCache:
    def __init__(self, stored: bytes) -> None:
        self.content = stored

    def serialize(self) -> bytes:
        return self.content + b"+tactics"


class Profile:
    def __init__(self) -> None:
        self.asked: dict[str, tuple[tuple[int, ...], ...]] = {}

    def set_shape(self, name: str, *shapes: tuple[int, ...]) -> None:
        self.asked[name] = shapes


class Config:
    def __init__(self, world: "Tensorrt") -> None:
        self.profiling_verbosity: Any = None
        self.builder_optimization_level: Any = None
        self.progress_monitor: Any = None
        self._world = world
        self._cache = TimingCache(b"")

    def set_memory_pool_limit(self, pool: enum.IntEnum, size: int) -> None:
        self._world.asked["workspace"] = (pool.name, size)

    def set_flag(self, flag: enum.IntEnum) -> None:
        self._world.asked.setdefault("flags", []).append(flag.name)

    def add_optimization_profile(self, profile: Profile) -> None:
        self._world.asked.setdefault("profiles", []).append(profile.asked)

    def create_timing_cache(self, stored: bytes) -> TimingCache:
        return TimingCache(stored)

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self._cache = cache
        return cache.content != b"of another GPU"

    def get_timing_cache(self) -> TimingCache:
        return self._cache


Tensor = namedtuple("Tensor", ("name", "shape"))
PARSER_ERROR = SimpleNamespace(
    node_name=lambda: "blocks.0.attn/Softmax", node_operator=lambda: "Softmax", desc=lambda: "Assertion failed:\n no"
)


def inspector(text: str) -> SimpleNamespace:
    return SimpleNamespace(get_engine_information=lambda form: {"JSON": text}[form.name])


def cuda_engine(text: str) -> SimpleNamespace:
    return SimpleNamespace(
        get_device_memory_size_for_profile_v2=lambda index: 1000 * (index + 1),
        create_engine_inspector=lambda: inspector(text),
    )


class Tensorrt:
    """A stand-in for the module tensorrt, whose builder logs `says` and returns `plan`."""

    __version__ = "11.4.0.106"
    BuilderFlag = enum.IntEnum("BuilderFlag", FLAGS_11_4, start=0)  # type: ignore[misc]
    NetworkDefinitionCreationFlag = enum.IntEnum("NetworkDefinitionCreationFlag", NETWORK_FLAGS_11_4, start=1)  # type: ignore[misc]
    ProfilingVerbosity = enum.IntEnum("ProfilingVerbosity", ["LAYER_NAMES_ONLY", "DETAILED", "NONE"], start=0)
    MemoryPoolType = enum.IntEnum("MemoryPoolType", ["WORKSPACE"], start=0)
    HardwareCompatibilityLevel = enum.IntEnum(
        "HardwareCompatibilityLevel", ["NONE", "AMPERE_PLUS", "SAME_COMPUTE_CAPABILITY"], start=0
    )
    LayerInformationFormat = enum.IntEnum("LayerInformationFormat", ["ONELINE", "JSON"], start=0)

    class ILogger:
        def log(self, severity: Any, text: str) -> None:
            raise NotImplementedError

    class IProgressMonitor:
        pass

    def __init__(self, *, inspected: Inspected | None = None, plan: bytes | None = b"plan", says: str = "") -> None:
        self.asked: dict[str, Any] = {}
        self.plan, self.says, self.parses, self.has_gpu = plan, says, True, True
        self.inputs = [Tensor("images", (-1, 3, 32, 32))]
        self.inspected = json.dumps(inspected or inspector_11())

    def Builder(self, logger: Any) -> SimpleNamespace:
        if not self.has_gpu:
            logger.log(1, "CUDA initialization failure with error: 35")
            raise TypeError("pybind11::init(): factory function returned nullptr")

        def create_network(flags: int) -> SimpleNamespace:
            self.asked["network flags"] = flags
            return SimpleNamespace(num_inputs=len(self.inputs), get_input=self.inputs.__getitem__)

        def create_builder_config() -> Config:
            self.asked["config"] = Config(self)
            return self.asked["config"]

        def build_serialized_network(network: SimpleNamespace, config: Config) -> bytes | None:
            config.progress_monitor.phase_start("Building engine", None, 2)
            assert config.progress_monitor.step_complete("Building engine", 0)
            config.progress_monitor.phase_finish("Building engine")
            if self.says:
                logger.log(1, self.says)
            return self.plan

        return SimpleNamespace(
            create_network=create_network, build_serialized_network=build_serialized_network,
            create_builder_config=create_builder_config,
            create_optimization_profile=Profile,
        )  # fmt: skip

    def OnnxParser(self, network: SimpleNamespace | None, logger: Any) -> SimpleNamespace:
        def parse_from_file(path: str) -> bool:
            self.asked["parsed"] = path
            return self.parses

        return SimpleNamespace(num_errors=1, parse_from_file=parse_from_file, get_error=lambda index: PARSER_ERROR)

    def Runtime(self, logger: Any) -> SimpleNamespace:
        def deserialize_cuda_engine(plan: bytes) -> SimpleNamespace:
            self.asked["host code"] = runtime.engine_host_code_allowed
            return cuda_engine(self.inspected)

        runtime = SimpleNamespace(engine_host_code_allowed=False, deserialize_cuda_engine=deserialize_cuda_engine)
        return runtime


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "tiny.onnx"
    save_onnx(export(Vit(depth=1), "fp16"), path)
    return path


def build(graph: Path, world: Tensorrt, **options: object) -> Engine:
    choices = BuildOptions(**{"backend": "tensorrt", "profiles": PROFILES, **options})  # type: ignore[arg-type]
    library = Library(name="tensorrt", version=world.__version__, module=world)
    return build_engine(graph, choices, library=library)


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def test_stand_in_has_only_names_of_tensorrt() -> None:
    world = Tensorrt()
    builder = world.Builder(None)
    stand_ins: dict[str, object] = {
        "IBuilderConfig": Config(world), "OnnxParser": world.OnnxParser(None, None), "Builder": builder,
        "Runtime": world.Runtime(None), "ICudaEngine": cuda_engine(""), "EngineInspector": inspector(""),
        "ITimingCache": TimingCache, "IOptimizationProfile": Profile(), "INetworkDefinition": builder.create_network(0),
        "ParserError": PARSER_ERROR, "ILogger": world.ILogger,
    }  # fmt: skip
    rtx = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx, which has the same object model, is not installed")
    own = {"content", "asked"}  # attributes of the stand-ins alone
    for name, stand_in in stand_ins.items():
        unlisted = public(stand_in) - NAMES_11_4.get(name, set()) - own
        assert unlisted <= public(vars(rtx)[name]), (name, unlisted)
    for name in ("MemoryPoolType", "ProfilingVerbosity", "LayerInformationFormat", "HardwareCompatibilityLevel"):
        assert set(vars(Tensorrt)[name].__members__) <= set(vars(rtx)[name].__members__)


def test_network_is_strongly_typed_without_precision_flags(graph: Path) -> None:
    world = Tensorrt()
    build(graph, world, workspace_bytes=1 << 30, optimization_level=4)
    assert world.asked["network flags"] == 1 << world.NetworkDefinitionCreationFlag["STRONGLY_TYPED"]
    assert "flags" not in world.asked
    assert world.asked["profiles"] == [{"images": ((1, 3, 32, 32), (8, 3, 32, 32), (64, 3, 32, 32))}]
    assert world.asked["workspace"] == ("WORKSPACE", 1 << 30)
    assert world.asked["config"].builder_optimization_level == 4
    assert world.asked["config"].profiling_verbosity.name == "DETAILED"
    assert world.asked["parsed"] == str(graph)
    assert world.asked["host code"] is False


def test_every_profile_contains_every_input(tmp_path: Path) -> None:
    world, batches = Tensorrt(), (BatchProfile.from_text("1:8:64"), BatchProfile.from_text("2"))
    world.inputs = [Tensor(port.name, (-1, *port.shape)) for port in INPUTS]
    record = build(write_text_onnx(tmp_path / "text.onnx"), world, profiles=batches).record
    assert world.asked["profiles"] == [
        {port.name: tuple((size, *port.shape) for size in sizes) for port in INPUTS}
        for sizes in ((1, 8, 64), (2, 2, 2))
    ]
    assert [port.name for port in record.inputs] == [port.name for port in INPUTS]


@pytest.mark.parametrize("inspected", [inspector_10(), inspector_11()], ids=["10", "11"])
def test_kernels_come_from_the_inspector_in_both_schemas(graph: Path, inspected: Inspected) -> None:
    record = build(graph, Tensorrt(inspected=inspected), command="build tiny.onnx").record
    assert (record.kernels, record.kernel_kinds) == (2, {"gemm": 1, "kgen": 1})
    assert (record.attention_sites, record.fused_attention_sites) == (("blocks.0.attn",), ("blocks.0.attn",))
    assert record.half_kernel_share == 0.5
    assert (record.library_version, record.plan_bytes, record.command) == ("11.4.0.106", 4, "build tiny.onnx")


def test_version_compatible_plans_allow_host_code(graph: Path) -> None:
    world = Tensorrt()
    record = build(graph, world, version_compatible=True).record
    assert world.asked["flags"] == ["VERSION_COMPATIBLE"]
    assert world.asked["host code"] is True
    assert record.options["version_compatible"] is True


@pytest.mark.parametrize("level", ["ampere-plus", "same-compute-capability"])
def test_compatibility_is_set_and_its_size_compared_with_an_exact_plan(graph: Path, tmp_path: Path, level: str) -> None:
    """The exact plan is built without either compatibility flag."""
    levels: list[str] = []

    class Priced(Tensorrt):
        def plan_of(self) -> bytes:
            chosen = getattr(self.asked["config"], "hardware_compatibility_level", None)
            levels.append("none" if chosen is None else chosen.name)
            return b"exact" if chosen is None else b"compatible"

        plan = property(plan_of, lambda self, _: None)

    world = Priced(says="Total Weights Memory: 4096 bytes")
    library = Library(name="tensorrt", version=world.__version__, module=world)
    choices = BuildOptions(backend="tensorrt", profiles=PROFILES, compatibility=level, version_compatible=True)
    record = build_priced(graph, choices, tmp_path / "m.plan", library=library).record
    assert levels == [level.replace("-", "_").upper(), "none"]
    price = record.compatibility
    assert price is not None
    assert (price.level, price.own.plan_bytes) == (level, len(b"compatible"))
    (exact,) = price.plans
    assert (exact.target, exact.plan_bytes, exact.kernels) == ("exact", len(b"exact"), 2)
    assert exact.device_memory_bytes == 4096 + 1000
    assert price.reason is not None
    assert record_of_plan(tmp_path / "m.plan") == record
    alone = record_of_plan(tmp_path / "m.exact.plan")
    assert ("compatibility" in alone.options, alone.options["version_compatible"]) == (False, False)
    assert record.options["compatibility"] == level
    assert bench_lines(record, Path("m.plan")) == (
        "corp-deploy bench m.exact.plan m.plan --batch 8 --output m.exact.bench.json",
    )
    assert "+100.0 % bytes, 2 kernels for 2, 1 fused attention for 1, +0.0 % memory" in [
        *engine_table(record).columns[1].cells
    ]


def test_options_a_builder_would_ignore_are_refused(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Tensorrt()
    monkeypatch.setattr(engine_build, "_gpu", lambda: ("An Old Card", "75"))
    old = r"ampere-plus: needs a GPU of Ampere \(SM80\) or newer to build, this one is a An Old Card"
    rejects(old, build, graph, world, compatibility="ampere-plus")
    Old = enum.IntEnum("Old", ["NONE", "AMPERE_PLUS"], start=0)
    monkeypatch.setattr(Tensorrt, "HardwareCompatibilityLevel", Old)
    known = r"same-compute-capability: tensorrt 11\.4\.0\.106 knows only NONE, AMPERE_PLUS"
    rejects(known, build, graph, world, compatibility="same-compute-capability")
    for level, reason in (("portable", "leave --sm out"), ("targets", "two targets or more")):
        rejects(reason, BuildOptions, backend="tensorrt-rtx", compatibility=level, sms=("86",))


def test_timing_cache_is_created_reused_and_refused(graph: Path, tmp_path: Path) -> None:
    cache = tmp_path / "timing.cache"
    first = build(graph, Tensorrt(), timing_cache=cache)
    assert (first.record.options["timing_cache"], cache.read_bytes()) == ("new", b"+tactics")
    second = build(graph, Tensorrt(), timing_cache=cache)
    assert (second.record.options["timing_cache"], cache.read_bytes()) == ("reused", b"+tactics+tactics")
    cache.write_bytes(b"of another GPU")
    rejects(r"not a timing cache of tensorrt 11\.4\.0\.106 on this GPU", build, graph, Tensorrt(), timing_cache=cache)
    assert cache.read_bytes() == b"of another GPU"
    assert [path.name for path in tmp_path.iterdir()] == ["timing.cache"]


def write_sparse(graph: Path, path: Path, sites: tuple[str, ...]) -> Path:
    """Write the graph with the first two of every four weights of these sites' matrices set to zero."""
    proto = onnx.load(graph)
    for tensor in proto.graph.initializer:
        if tensor.name.endswith("MatMul.1") and tensor.name.startswith(sites):
            values = numpy_helper.to_array(tensor).copy()
            values[0::4] = values[1::4] = 0
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(proto, path)
    return path


@pytest.mark.parametrize(("sites", "share"), [(("blocks.0.mlp.fc1",), 0.2), (("blocks.",), 0.8)])
def test_sparse_flag_is_set_for_two_to_four_weights(
    graph: Path, tmp_path: Path, sites: tuple[str, ...], share: float
) -> None:
    rejects("and none of its 5 matrices has them; leave --sparse out", build, graph, Tensorrt(), sparse=True)
    world = Tensorrt()
    record = build(write_sparse(graph, tmp_path / "sparse.onnx", sites), world, sparse=True).record
    assert (record.options["sparse"], record.options["sparse_share"]) == (True, share)
    write_json(tmp_path / "sparse.plan.json", record.to_json())
    assert record_of_plan(tmp_path / "sparse.plan") == record
    told = f"{share:.0%} of the matrices are 2:4, the builder doesn't say which kernels it took"
    assert told in [*engine_table(record).columns[1].cells]
    assert world.asked["flags"] == ["SPARSE_WEIGHTS"]


EIGHT = (
    "(Sparsity) Layers eligible for sparse math: blocks.0.mlp.fc1/MatMul + blocks.0.mlp/Gelu, blocks.0.mlp.fc2/MatMul\n"
    "(Sparsity) TRT inference plan picked sparse implementation for layers: blocks.0.mlp.fc2/MatMul"
)
TEN = (
    "(Sparsity) Found 1 layer(s) eligible to use sparse tactics: a\n"
    "(Sparsity) Chose 1 layer(s) using sparse tactics: a\n"
    "(Sparsity) Found 39 layer(s) eligible to use sparse tactics\n(Sparsity) Chose 0 layer(s) using sparse tactics"
)


@pytest.mark.parametrize(
    ("says", "eligible", "picked", "shown"),
    [
        (EIGHT, 2, 1, "sparse kernels for 1 layers of 2 that it could run sparse"),
        (TEN, 39, 0, "sparse kernels for 0 layers of 39 that it could run sparse"),
        ("", None, None, "the builder doesn't say which kernels it took"),
    ],
)
def test_builder_messages_on_sparse_kernels_are_recorded(
    graph: Path, tmp_path: Path, says: str, eligible: int | None, picked: int | None, shown: str
) -> None:
    sparse = write_sparse(graph, tmp_path / "sparse.onnx", ("blocks.0.mlp.fc1/",))
    record = build(sparse, Tensorrt(says=says), sparse=True).record
    assert (record.sparse_eligible, record.sparse_layers) == (eligible, picked)
    assert record.sparse_names == (("blocks.0.mlp.fc2/MatMul",) if says == EIGHT else ())
    write_json(tmp_path / "sparse.plan.json", record.to_json())
    assert record_of_plan(tmp_path / "sparse.plan") == record
    assert any(shown in str(cell) for cell in engine_table(record).columns[1].cells)


def test_memory_is_reported_per_profile_with_the_builders_weights(graph: Path) -> None:
    two = (BatchProfile.from_text("1:8:64"), BatchProfile.from_text("2"))
    record = build(graph, Tensorrt(says="Total Weights Memory: 4096 bytes"), profiles=two).record
    assert (record.memory.weights_bytes, record.memory.activations_bytes) == (4096, (1000, 2000))
    assert record.device_memory_bytes == {"1:8:64": 5096, "2:2:2": 6096}
    silent = build(graph, Tensorrt()).record
    assert silent.memory.reason == "the builder doesn't tell the weights' memory"
    assert silent.device_memory_bytes == {}
    assert "activations 0.0 MB up to batch 64" in str([*engine_table(silent).columns[1].cells])


def test_memory_of_unknown_profiles_is_refused(graph: Path, tmp_path: Path) -> None:
    content = build(graph, Tensorrt()).record.to_json()
    content["memory"] = {"weights_bytes": 1, "activations_bytes": [1, 2], "reason": None}
    (tmp_path / "m.plan.json").write_text(json.dumps(content))
    rejects("memory of 2 profiles, expected 1", record_of_plan, tmp_path / "m.plan")


def test_parser_and_builder_errors_are_reported_once_with_their_site(graph: Path) -> None:
    world = Tensorrt()
    world.parses = False
    rejects(r"take this graph:\n  blocks.0.attn/Softmax \(Softmax\): Assertion failed: no$", build, graph, world)
    failing = Tensorrt(plan=None, says="Could not find any implementation for node {blocks.0.mlp.fc1/MatMul}")
    rejects(r"could not build this graph:\n  blocks.0.mlp.fc1: Could not find any", build, graph, failing)


def test_absent_gpu_is_reported_as_missing(graph: Path) -> None:
    world = Tensorrt()
    world.has_gpu = False
    with pytest.raises(Missing) as missing:
        build(graph, world, command="build tiny.onnx --backend tensorrt")
    for part in ("an NVIDIA GPU and its driver", "initialization failure", "machine that has it: build tiny.onnx"):
        assert part in str(missing.value)
    with pytest.raises(Missing, match="GPU and its driver"):
        build(graph, Tensorrt(plan=None, says="cudaError 35: CUDA driver version is insufficient"))


def test_engine_without_layer_details_is_refused(graph: Path) -> None:
    rejects("layer names only", build, graph, Tensorrt(inspected={"Layers": ["a", "b"]}))


def test_old_and_absent_tensorrt_are_reported_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Tensorrt()
    monkeypatch.setattr(importlib, "import_module", lambda name: world)
    assert open_library("tensorrt").module is world
    monkeypatch.setattr(Tensorrt, "__version__", "10.16.0.72")
    reports_missing(r"version 10\.16\.1 or newer is needed, 10\.16\.0\.72 is installed", open_library, "tensorrt")
