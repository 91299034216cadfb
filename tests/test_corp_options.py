"""Each option of each command is used or refused, in every variant that the support tables list."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest
from click.testing import Result

from corp_deploy.cli import main
from corp_deploy.commands.command import ModelChoice
from corp_deploy.commands.options import typed_name
from corp_deploy.invocation import reduction_table
from corp_deploy.invocation import table as option_table
from corp_deploy.invocation.option_support import Axis, words_of
from corp_deploy.invocation.reduction_table import ATTENTION, IMAGES, LOOP, POLISH, PRESET, WIDTHS
from corp_deploy.invocation.running import RunOptions
from corp_deploy.invocation.table import AUDIT, BENCH, BUILD, CALIBRATE, EXPORT, VERIFY
from corp_deploy.proof import contender, model_contender, speed
from corp_deploy.proof.contender import contender_from_engine
from corp_deploy.reduction.method import PRESETS
from corp_deploy.store.graph_facts import facts_of_onnx
from export.engine.options import BuildOptions
from export.engine.record import EngineRecord, record_path, sha256_of
from export.graph.ports import GraphPort
from ground.built_engines import record_built_engine
from ground.errors import Missing
from ground.files import write_json
from tests import tiny
from tests.command import invoked, refuses, run
from tests.export_served import engine_record

REACHED = "reached what does the work"
VALUES: dict[str, tuple[Any, ...]] = {
    "backend": ("onnxruntime", "openvino", "torch", "aotinductor"), "device": ("cpu", "cuda"),
    "provider": ("cpu", "cuda", "tensorrt"), "dtype": ("fp32", "fp16", "bf16"),
    "mode": ("eager", "compiled", "cuda_graph"), "threads": (3,), "streams": (2,), "flush_l2": (True,),
}  # fmt: skip
VARIANT_OPTIONS = {"backend", "device", "provider"}  # another value of these selects another variant


def record_of(backend: str) -> EngineRecord:
    port = GraphPort(name="images", dtype="float32", shape=("batch", 3, 32, 32))
    return engine_record(backend=backend, inputs=(port,), outputs=(port,), profiles=("1:2:4",))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny.written(tmp_path_factory.mktemp("home"), 8)
    invoked("export", "--model", root / "dense", "-o", root / "dense.onnx")
    record_built_engine(sha256_of(b"plan"))
    for backend in ("tensorrt", "tensorrt-rtx", "onnxruntime"):
        plan = root / f"{backend}.plan"
        plan.write_bytes(b"plan")
        write_json(record_path(plan), record_of(backend).to_json())
    return root


def assert_refused(result: Result, axis: Axis, option: str, value: object) -> None:
    """Require exit code 2 and one message that names the option and every variant that supports it."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    said = " ".join(result.stderr.split())
    assert " ".join(words_of({option: value})) in said, said
    able = [way for way in axis.variants.values() if way.supports(option, value)]
    assert all(f"{way.label} ({way.how})" in said for way in able), said
    assert able or "it affects nothing" in said


# Bench: the options that select each variant, and its runner; torch packages have a file of their own.

ASKED: dict[str, tuple[str, dict[str, str]]] = {
    "torch-cpu": ("dense", {"backend": "torch"}),
    "torch-cuda": ("dense", {"backend": "torch", "device": "cuda"}),
    "onnxruntime-cpu": ("dense.onnx", {}),
    "onnxruntime-cuda": ("dense.onnx", {"provider": "cuda"}),
    "onnxruntime-tensorrt": ("dense.onnx", {"provider": "tensorrt"}),
    "openvino": ("dense.onnx", {"backend": "openvino"}),
    "tensorrt": ("tensorrt.plan", {}),
    "tensorrt-rtx": ("tensorrt-rtx.plan", {}),
}
PAIRS = [
    (way, option, value)
    for way in ASKED
    for option, values in VALUES.items()
    for value in values
    if option not in ASKED[way][1]
]


@dataclass
class Seen:
    """The name of the runner that was opened, and the arguments of the runner and the measurement."""

    runner: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()

    def stand_in(name: str) -> None:
        def opened(*_: object, **arguments: Any) -> None:
            found.runner, found.arguments = name, found.arguments | arguments

        monkeypatch.setattr(model_contender if name == "ModuleRunner" else contender, name, opened)

    def measured(subjects: Any, *_: object, **arguments: Any) -> NoReturn:
        found.arguments |= arguments
        subjects[0].open()
        raise Missing(REACHED)

    for name in ("ModuleRunner", "OnnxRunner", "OpenVinoRunner", "EngineRunner"):
        stand_in(name)
    monkeypatch.setattr(speed, "bench_subjects", measured)
    monkeypatch.setattr(speed, "read_gpu_uuid", lambda: None)
    return found


@pytest.mark.slow("graph")
@pytest.mark.parametrize(("way", "option", "value"), PAIRS)
def test_bench_uses_or_refuses_every_option(
    home: Path, tmp_path: Path, seen: Seen, way: str, option: str, value: Any
) -> None:
    name, asked = ASKED[way]
    words = [home / name, home / name, *words_of(asked | {option: value}), "-o", tmp_path / "b.json"]
    result = run("bench", *words)
    assert list(tmp_path.iterdir()) == []
    if not BENCH.variants[way].supports(option, value):
        # `--provider cuda` on a graph and `--device cuda` on a module select another variant.
        others = [other for other, (path, words) in ASKED.items() if path == name and words == asked | {option: value}]
        if not others:
            by_provider = value == "openvino" and "provider" in asked  # OpenVINO would ignore the provider
            assert_refused(result, BENCH, *(("provider", asked["provider"]) if by_provider else (option, value)))
            return
        way = others[0]
    assert result.exit_code == 4, result.output
    assert REACHED in result.stderr
    family = way.partition("-")[0]
    runners = {"torch": "ModuleRunner", "onnxruntime": "OnnxRunner", "openvino": "OpenVinoRunner"}
    assert seen.runner == runners.get(family, "EngineRunner")
    if option == "dtype":
        assert seen.arguments["arithmetic" if family == "openvino" else "precision"] == value
    elif option == "mode" and family == "openvino":
        assert value == "eager"
    elif option == "mode":
        argument, expected = ("mode", value) if family == "torch" else ("cuda_graph", value == "cuda_graph")
        assert seen.arguments[argument] == expected
    elif option not in VARIANT_OPTIONS or (family == "torch" and option == "device"):
        assert seen.arguments[option] == value


def test_bench_of_a_directory_follows_the_rules_of_its_graph(home: Path, tmp_path: Path) -> None:
    """A directory's graph would otherwise be measured in FP32 on the CPU, with exit code 0."""
    for option, value, more in (("dtype", "fp16", ""), ("device", "cuda", "--provider cuda")):
        result = run("bench", home / "dense", home / "dense", f"--{option}", value, "-o", tmp_path / "b")
        assert_refused(result, BENCH, option, value)
        assert more in result.stderr


def test_backend_options_must_apply_to_both_subjects(home: Path, tmp_path: Path, seen: Seen) -> None:
    """A module beside an engine needs its backend named; a precision that one of them ignores is refused."""
    both = ["bench", home / "dense", home / "tensorrt.plan", "-o", tmp_path / "b.json", "--backend", "torch"]
    assert REACHED in run(*both, "--device", "cuda").stderr
    assert_refused(run(*both, "--device", "cuda", "--dtype", "fp16"), BENCH, "dtype", "fp16")
    refuses("expected both on one device", *both)


def test_engine_takes_its_cost_from_its_own_graph(home: Path, tmp_path: Path) -> None:
    graph, plan = tmp_path / "model.onnx", tmp_path / "model.plan"
    graph.write_bytes((home / "dense.onnx").read_bytes())
    plan.write_bytes(b"plan")
    content = graph.read_bytes()
    record = replace(record_of("tensorrt"), onnx_sha256=sha256_of(content), onnx_bytes=len(content))
    write_json(record_path(plan), record.to_json())
    facts = facts_of_onnx(graph)
    engine = contender_from_engine("dense", plan, RunOptions())
    assert (engine.macs, engine.params) == (facts.macs, facts.parameters)
    assert engine.macs
    graph.write_bytes(content + b"\0")
    engine = contender_from_engine("dense", plan, RunOptions())
    assert (engine.macs, engine.params) == (None, None)


def test_optimised_graph_named_plan_is_not_an_engine(home: Path, tmp_path: Path) -> None:
    graphs = (home / "onnxruntime.plan", home / "dense.onnx")
    refuses("which runs .onnx files", "bench", *graphs, "-o", tmp_path / "b.json")


# Build

BUILD_VALUES: dict[str, tuple[Any, str, Any]] = {
    "batch": (["1:2:4"], "profiles", "(1:2:4,)"),
    "sm": (["86"], "sms", "('86',)"),
    "timing_cache": ("cache.bin", "timing_cache", "cache.bin"),
    "optimization_level": (3, "optimization_level", "3"),
    "workspace_mib": (2, "workspace_bytes", str(2 * 2**20)),
    "version_compatible": (True, "version_compatible", "True"),
    "sparse": (True, "sparse", "True"),
    "compatibility": ("ampere-plus", "compatibility", "ampere-plus"),
    "precision": ("fp32", "precision", "fp32"),
    "device": ("cuda", "device", "cuda"),
}
BUILD_ASKED: dict[str, dict[str, Any]] = {
    "tensorrt": {"backend": "tensorrt"},
    "tensorrt-rtx": {"backend": "tensorrt-rtx"},
    "onnxruntime-cpu": {"backend": "onnxruntime"},
    "onnxruntime-cuda": {"backend": "onnxruntime", "device": "cuda"},
}


@pytest.mark.parametrize("option", BUILD_VALUES)
@pytest.mark.parametrize("way", BUILD.variants)
def test_build_uses_or_refuses_every_option(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, option: str
) -> None:
    arguments: dict[str, Any] = {}

    def engine(graph: Path, method: BuildOptions, **_: object) -> NoReturn:
        arguments.update({name: getattr(method, name) for name in method.__slots__})
        raise Missing(REACHED)

    def graph(path: Path, **given: Any) -> NoReturn:
        arguments.update(given)
        raise Missing(REACHED)

    monkeypatch.setattr("export.engine.build.build_engine", engine)
    monkeypatch.setattr("corp_deploy.proof.compatibility.build_engine", engine)
    monkeypatch.setattr("export.engine.build.build_ort_artifact", graph)
    value, name, arrives = BUILD_VALUES[option]
    asked = BUILD_ASKED[way] | {option: value}
    result = run("build", home / "dense.onnx", *words_of(asked), "-o", tmp_path / "x")
    if way == "onnxruntime-cpu" and option == "device":
        way = "onnxruntime-cuda"
    if not BUILD.variants[way].supports(option, value):
        assert_refused(result, BUILD, option, value)
        return
    assert result.exit_code == 4, result.output
    assert str(arguments[name]).replace("BatchProfile(smallest=1, tuned=2, largest=4)", "1:2:4") == arrives


@pytest.mark.parametrize("way", AUDIT.variants)
def test_audit_takes_targets_of_one_backend(home: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    def audited(*_: object, **arguments: Any) -> NoReturn:
        raise Missing(f"{REACHED} {arguments['sms']}")

    monkeypatch.setattr("export.engine.audit.audit_fusion", audited)
    result = run("audit", home / "dense.onnx", home / "dense.onnx", "--backend", way, "--sm", "89")
    if way == "tensorrt":
        assert_refused(result, AUDIT, "sm", "89")
        assert "for the GPU it runs on" in " ".join(result.stderr.split())
    else:
        assert "('89',)" in result.stderr


# The commands that take a model: an accepted call gets as far as loading the model.


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: ModelChoice, out: object) -> NoReturn:
        raise Missing(REACHED)

    monkeypatch.setattr(ModelChoice, "load", load)
    monkeypatch.setattr("corp_deploy.proof.prove.candidates_from_paths", lambda paths, runtimes=(): [])
    monkeypatch.setattr("ground.gpu.require_device", lambda device: None)
    monkeypatch.setattr("perf.runners.protocol.torch_gauge", lambda: None)


EXPORT_ASKED: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "fp16": {"precision": "fp16"},
    "mixed": {"precision": "mixed", "keep_fp32": "blocks.1"},
    "mixed-auto": {"precision": "mixed", "auto": True, "images": "images.npy"},
    "bf16": {"precision": "bf16"},
    "mixed-bf16": {"precision": "mixed-bf16", "keep_fp32": "blocks.1"},
    "mixed-bf16-auto": {"precision": "mixed-bf16", "auto": True, "images": "images.npy"},
    "int8": {"precision": "int8", "images": "images.npy"},
    "int8-auto": {"precision": "int8", "auto": True, "images": "images.npy"},
    "fp8": {"precision": "fp8", "images": "images.npy"},
    "fp8-auto": {"precision": "fp8", "auto": True, "images": "images.npy"},
}
EXPORT_VALUES = {
    "keep_fp32": "blocks.0", "images": "images.npy", "samples": 3, "seed": 1, "dense": "dense", "engine": "tensorrt",
}  # fmt: skip


@pytest.mark.usefixtures("unloaded")
def test_export_accepts_options_used_by_any_requested_precision(tmp_path: Path) -> None:
    words = ["export", "--model", "m", "-o", tmp_path / "m.onnx", "--precision", "fp32,mixed"]
    assert REACHED in run(*words, "--keep-fp32", "blocks.1").stderr
    assert_refused(run("export", "--model", "m", "-o", tmp_path / "m.onnx", "--auto"), EXPORT, "auto", True)


def test_export_refuses_heads_if_all_widths_are_equal(home: Path, tmp_path: Path) -> None:
    result = run("export", "--model", home / "dense", "-o", tmp_path / "m.onnx", "--heads", "ragged")
    assert_refused(result, option_table.EXPORT_HEADS, "heads", "ragged")
    assert list(tmp_path.iterdir()) == []


REDUCE = ["reduce", "--model", "m", "--moments", "m.safetensors", "-o", "r"]
SWEEP = ["sweep", "--model", "m", "--moments", "m.safetensors", "--images", "images.npy", "-o", "s"]
Asked = Iterable[tuple[str, dict[str, Any]]]
ASKED_OF: list[tuple[list[str], Axis, Asked, Iterable[tuple[str, Any]]]] = [
    (["export", "--model", "m", "-o", "m.onnx"], EXPORT, EXPORT_ASKED.items(), EXPORT_VALUES.items()),
    (
        ["verify", "m", "m", "-o", "p.json"],
        VERIFY,
        [("images", {"images": "images.npy"}), ("random", {"random": 4}), ("none", {})],
        [("labels", "labels.npy"), ("moments", "m.safetensors"), ("samples", 3), ("seed", 1)],
    ),
    (
        ["calibrate", "--model", "m", "--images", "images.npy", "-o", "m.safetensors"],
        CALIBRATE,
        [(device, {"device": device}) for device in CALIBRATE.variants],
        [("dtype", dtype) for dtype in ("float32", "bfloat16", "tf32")],
    ),
    (
        REDUCE,
        WIDTHS,
        [
            ("sparsities", {"mlp": 0.5}),
            ("macs", {"macs": 0.5}),
            ("params", {"params": 0.5}),
            ("latency", {"latency": 0.5, "latency_tables": "tables"}),
            ("within", {"within": "accuracy -1"}),
        ],
        [("latency_tables", "tables"), ("batch", 4), ("judge", "others.npy"), ("labels", "labels.npy")],
    ),
    (
        REDUCE,
        IMAGES,
        [
            ("none", {"mlp": 0.5}),
            ("images", {"macs": 0.5}),
            ("images", {"mlp": 0.5, "closed_loop": True}),
            ("images", {"mlp": 0.5, "preset": "grail-fold"}),
        ],
        [("images", "images.npy"), ("samples", 3), ("seed", 1)],
    ),
    (
        [*REDUCE, "--mlp", "0.5"],
        LOOP,
        [
            ("open", {}),
            ("asymmetric", {"closed_loop": True}),
            ("asymmetric", {"closed_loop": "asymmetric"}),
            ("symmetric", {"closed_loop": "symmetric"}),
        ],
        [("reads", "all"), ("reads", "pooled")],
    ),
    (
        [*REDUCE, "--mlp", "0.5"],
        POLISH,
        [(way, {"polish": None if way == "none" else way}) for way in POLISH.variants],
        [("polish_steps", 3), ("polish_time", 2.5)],
    ),
    (
        SWEEP,
        PRESET,
        [
            (name, {"preset": name, "calibration_images": "i.npy" if preset.merges else None})
            for name, preset in PRESETS.items()
        ],
        [("parts", "joint"), ("parts", "mlp"), ("parts", "attn")],
    ),
]
CASES = [
    (words, axis, way, asked, option, value)
    for words, axis, ways, values in ASKED_OF
    for way, asked in ways
    for option, value in values
]


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(("words", "axis", "way", "asked", "option", "value"), CASES)
def test_ignored_options_are_refused(
    words: list[str], axis: Axis, way: str, asked: dict[str, Any], option: str, value: object
) -> None:
    result = run(*words, *words_of(asked | {option: value}))
    if axis.variants[way].supports(option, value):
        assert REACHED in result.stderr, result.output
    else:
        assert_refused(result, axis, option, value)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    "given",
    [
        {"attn": 0.5}, *({"heads": heads, "mlp": 0.5} for heads in ("padded", "square", "ragged", "auto")),
        {"macs": 0.5}, {"params": 0.5}, {"latency": 0.5, "latency_tables": "tables"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("preset", PRESETS)
def test_reduce_refuses_options_its_preset_ignores(preset: str, given: dict[str, Any]) -> None:
    way, (option, value) = PRESET.variants[preset], next(iter(given.items()))
    more = {"attn": 0.5} if option == "heads" and way.supports("attn", 0.5) else {}
    result = run(*REDUCE, "--preset", preset, *words_of(given | more))
    if way.supports(option, value):
        assert REACHED in result.stderr, result.output
    else:
        assert_refused(result, PRESET, option, value)


@pytest.mark.usefixtures("unloaded")
def test_geometry_needs_a_preset_that_reduces_heads() -> None:
    assert_refused(run(*REDUCE, "--mlp", 0.5, "--heads", "ragged"), ATTENTION, "heads", "ragged")
    assert REACHED in run(*REDUCE, "--mlp", 0.5, "--attn", 0.5, "--heads", "ragged").stderr
    assert REACHED in run(*SWEEP, "--preset", "best,grail", "--heads", "square").stderr
    assert_refused(run(*SWEEP, "--preset", "grail", "--heads", "square"), PRESET, "heads", "square")
    assert_refused(run(*SWEEP, "--parts", "mlp", "--heads", "square"), ATTENTION, "heads", "square")


def test_decoder_options_are_refused_for_other_models(home: Path, tmp_path: Path) -> None:
    graphs = (home / "dense.onnx", home / "dense.onnx")
    message = run("bench", *graphs, "--cached", 8, "-o", tmp_path / "b.json").stderr
    assert "--cached 8 has no effect on models" in message
    assert "graphs of decoders (directories of export-decoder)" in message
    words = ("verify", home / "dense", graphs[0], "--random", 2, "--length", 8, "-o", tmp_path / "p.json")
    refuses("--length 8 has no effect on a model as REFERENCE", *words)


AXES = [
    (name, each)
    for table in (option_table, reduction_table)
    for name, each in vars(table).items()
    if isinstance(each, Axis)
]
COMMANDS = {"INPUTS": ("calibrate", "sweep", "verify"), "CALIBRATE": ("calibrate", "sweep")}


@pytest.mark.parametrize(("name", "axis"), AXES)
def test_support_table_lists_only_options_of_its_command(name: str, axis: Axis) -> None:
    default = ("reduce", "sweep") if name in vars(reduction_table) else (name.partition("_")[0].lower(),)
    commands = [main.commands[each] for each in COMMANDS.get(name, default)]
    options = [each for command in commands for each in command.params if isinstance(each, click.Option)]
    assert set(axis.options) <= set(map(typed_name, options))
    assert axis.picks <= set(axis.options)
