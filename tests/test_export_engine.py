"""Real TensorRT-RTX engines, built without a GPU: fused attention, records and refusals."""

import json
import signal
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import pytest
import timm
import torch
from torch import nn

from corp_deploy.proof.compatibility import build_priced
from export.engine.audit import audit_fusion, record_of_audits
from export.engine.build import Engine, build_engine, write_engine
from export.engine.options import RTX_TARGETS, BatchProfile, BuildOptions
from export.engine.record import record_of_plan, record_path, sha256_of
from export.graph.to_onnx import save_onnx
from ground.ports import image_port
from ground.vulnerabilities import version_numbers
from tests.doubles import some
from tests.export_vit import Attention, Vit, export
from tests.graphs import needs_rtx
from tests.refusals import rejects

pytestmark = needs_rtx

BATCHES = (BatchProfile(smallest=1, tuned=8, largest=64),)
SMALL_SITES = ("blocks.0.attn", "blocks.1.attn", "blocks.2.attn")


def dense_small() -> nn.Module:
    """Return timm's model with random weights and attention as MatMul, Softmax and MatMul."""
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("deit_small_patch16_224", depth=3).eval()
    for module in model.modules():
        if isinstance(module, timm.layers.Attention):
            module.fused_attn = False  # type: ignore[misc]  # marked final, yet the switch that timm offers
    return model


def deit_small(qk: int, v: int, padded: bool) -> Vit:
    """Make three blocks of DeiT-S with reduced heads and half the hidden width."""
    shape = {"dim": 384, "heads": 6, "hidden": 768, "depth": 3, "size": 224, "patch": 16, "classes": 1000}
    return Vit(**shape, qk=qk, v=v, padded=padded)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": dense_small,
    "square": lambda: deit_small(32, 32, padded=False),
    "padded": lambda: deit_small(32, 64, padded=True),
    "ragged": lambda: deit_small(32, 64, padded=False),
    "tiny": lambda: Vit(),
}


class Graphs:
    """Graphs and engines that are made once for the whole file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engines: dict[Path, Engine] = {}

    def path(self, kind: str, precision: str = "fp16", keep: str = "", batch: int | None = None) -> Path:
        path = self.folder / f"{kind}-{precision}-{keep}-{batch}.onnx"
        if not path.exists():
            size, kept = 32 if kind == "tiny" else 224, [keep] if keep else []
            port = image_port((3, size, size))
            save_onnx(export(MODELS[kind](), precision, port, keep_fp32=kept, batch=batch), path)
        return path

    def engine(self, kind: str, precision: str = "fp16", keep: str = "") -> Engine:
        path = self.path(kind, precision, keep)
        if path not in self.engines:
            self.engines[path] = build(path)
        return self.engines[path]


def build(path: Path, **options: object) -> Engine:
    choices = BuildOptions(**{"backend": "tensorrt-rtx", "profiles": BATCHES, "sms": ("86",), **options})  # type: ignore[arg-type]
    return build_engine(path, choices)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    return Graphs(tmp_path_factory.mktemp("graphs"))


@pytest.mark.slow("graph", "engine")
@pytest.mark.parametrize(("kind", "fused"), [("dense", 3), ("square", 3), ("padded", 3), ("ragged", 0)])
def test_equal_and_padded_heads_stay_fused_and_ragged_ones_do_not(graphs: Graphs, kind: str, fused: int) -> None:
    record = graphs.engine(kind).record
    assert (record.attention_sites, record.fused_attention_sites) == (SMALL_SITES, SMALL_SITES[:fused])
    assert (record.precision, record.half_weight_share, record.half_kernel_share) == ("fp16", 1.0, 1.0)
    assert record.kernels is not None
    assert (record.kernels > graphs.engine("dense").record.kernels) == (kind == "ragged")  # type: ignore[operator]


@pytest.mark.slow("engine")
def test_repeated_builds_give_equal_plans(graphs: Graphs) -> None:
    again = build(graphs.path("padded"))
    assert again.plan == graphs.engine("padded").plan
    assert again.record.plan_sha256 == sha256_of(again.plan)


@pytest.mark.slow("graph", "engine")
def test_mixed_loses_the_fused_kernel_only_in_kept_attention(graphs: Graphs) -> None:
    mlp = graphs.engine("tiny", "mixed", "blocks.1.mlp").record
    attention = graphs.engine("tiny", "mixed", "blocks.1.attn").record
    assert mlp.fused_attention_sites == ("blocks.0.attn", "blocks.1.attn")
    assert attention.fused_attention_sites == ("blocks.0.attn",)
    assert (mlp.precision, attention.precision) == ("mixed", "mixed")
    assert 0.5 < mlp.half_weight_share < 1.0
    assert 0.5 < some(mlp.half_kernel_share) < 1.0


@pytest.mark.slow("graph", "engine")
def test_static_batch_needs_no_profile_and_refuses_other_batches(graphs: Graphs) -> None:
    path = graphs.path("tiny", "fp16", "", 4)
    record = build(path, profiles=()).record
    assert (record.fused_attention, record.profiles, record.inputs[0].shape) == (2, (), (4, 3, 32, 32))
    assert build(path, profiles=(BatchProfile.from_text("4"),)).record.plan_sha256 == record.plan_sha256
    rejects("fixed at 4, asked for 1:8:64", build, path)
    rejects("batch is dynamic; name at least one profile", build, graphs.path("tiny"), profiles=())


@pytest.mark.slow("engine")
@pytest.mark.parametrize(
    "sms", [*((sm,) for sm in RTX_TARGETS), (), ("86", "120")], ids=lambda sms: "+".join(sms) or "none"
)
def test_every_target_builds(graphs: Graphs, sms: tuple[str, ...]) -> None:
    record = build(graphs.path("tiny"), sms=sms, workspace_bytes=1 << 30).record
    assert (record.targets, record.fused_attention) == (sms or ("portable",), 2)
    assert record.options["workspace_bytes"] == 1 << 30


def test_engine_record_describes_the_build_and_round_trips(graphs: Graphs, tmp_path: Path) -> None:
    path = graphs.path("tiny")
    engine = build(path, command="build tiny.onnx")
    write_engine(engine, tmp_path / "tiny.plan")
    text = record_path(tmp_path / "tiny.plan").read_text()
    record = record_of_plan(tmp_path / "tiny.plan")
    assert record == engine.record
    assert record.onnx_sha256 == sha256_of(path.read_bytes())
    assert record.plan_sha256 == sha256_of((tmp_path / "tiny.plan").read_bytes())
    assert (record.backend, record.command, record.gpu) == ("tensorrt-rtx", "build tiny.onnx", None)
    assert version_numbers(record.library_version) >= (1, 2)
    assert record.inputs[0].shape == ("batch", 3, 32, 32)
    assert record.build_seconds > 0.0
    content = json.loads(text)
    assert content["fused_attention"] == 2
    for broken in ("{", "[]", json.dumps({**content, "version": 2}), json.dumps({**content, "onnx_sha256": "0"})):
        record_path(tmp_path / "tiny.plan").write_text(broken)
        rejects(r"tiny\.plan\.json", record_of_plan, tmp_path / "tiny.plan")


@pytest.mark.slow("engine")
def test_audit_names_blocks_that_lost_their_kernel(graphs: Graphs) -> None:
    dense = graphs.path("dense")
    (failed,) = audit_fusion(dense, graphs.path("ragged"))
    assert (failed.lost, failed.passed) == (SMALL_SITES, False)
    passed = audit_fusion(dense, graphs.path("padded"), sms=("80", "portable"))
    assert [(audit.target, audit.lost, audit.passed) for audit in passed] == [("80", (), True), ("portable", (), True)]
    (static,) = audit_fusion(graphs.path("tiny"), graphs.path("tiny", "fp16", "", 4))
    assert (static.dense.fused_attention, static.reduced.fused_attention) == (2, 2)
    content = record_of_audits([failed], dense="dense.onnx", reduced="ragged.onnx")
    assert (content["version"], content["kind"]) == (1, "fusion-audit")
    assert content["targets"][0]["lost"] == list(SMALL_SITES)
    assert content["targets"][0]["dense"]["fused_attention"] == 3


class SdpaAttention(Attention):
    """The same attention with torch's operator, which opset 23 exports as one Attention node."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = self.qkv(x).split([self.heads * self.qk, self.heads * self.qk, self.heads * self.v], dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in split)
        mixed: torch.Tensor = self.proj(
            nn.functional.scaled_dot_product_attention(q, k, v, scale=self.scale).transpose(1, 2).flatten(2)
        )
        return mixed


@pytest.mark.slow("graph", "engine")
@pytest.mark.parametrize(("qk", "v"), [(32, 32), (16, 32)])
def test_attention_operator_builds_only_with_equal_widths(qk: int, v: int, tmp_path: Path) -> None:
    model = Vit(depth=1)
    model.blocks[0].attn = SdpaAttention(64, 2, qk, v, padded=False)
    proto = export(model, "fp16", opset=23)
    assert [node.name for node in proto.graph.node if node.op_type == "Attention"] == ["blocks.0.attn/Attention"]
    save_onnx(proto, tmp_path / "attention.onnx")
    if qk == v:
        assert build(tmp_path / "attention.onnx").record.fused_attention_sites == ("blocks.0.attn",)
    else:
        said = r"blocks.0.attn/Attention: .* equal widths of k and v, got \(16, 32\)"
        rejects(said, build, tmp_path / "attention.onnx")


def test_parser_errors_name_the_site(graphs: Graphs, tmp_path: Path) -> None:
    proto = onnx.load(graphs.path("tiny"))
    names = [node.name for node in proto.graph.node]
    at = names.index("blocks.1.mlp.act/Gelu")
    proto.graph.node[at].op_type = "Bernoulli"  # a standard operator that no parser takes
    del proto.graph.node[at].attribute[:]
    onnx.save(proto, tmp_path / "odd.onnx")
    rejects(r"does not take this graph:\n  blocks\.1\.mlp\.act/Gelu \(Bernoulli\): .", build, tmp_path / "odd.onnx")


@pytest.mark.slow("engine")
def test_builder_errors_name_the_site(graphs: Graphs) -> None:
    if version_numbers(version("tensorrt-rtx")) < (1, 7):
        pytest.skip("tensorrt-rtx before 1.7 builds FP32 for Turing too, so that nothing fails")
    said = r"could not build this graph:\n  .*blocks\.0\.attn\.qkv.*Turing"
    rejects(said, build, graphs.path("tiny", "fp32"), sms=("75",))


def test_invalid_files_are_refused_before_the_build(graphs: Graphs, tmp_path: Path) -> None:
    whole = graphs.path("tiny").read_bytes()
    (tmp_path / "cut.onnx").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "foreign.onnx").write_bytes(b"not an ONNX file at all\n")
    old = onnx.load_model_from_string(whole)
    old.opset_import[0].version = 13
    onnx.save(old, tmp_path / "old.onnx")
    for name, says in (("cut", "cut short"), ("foreign", "not an ONNX"), ("old", "opset 13"), ("absent", "no such")):
        rejects(says, build, tmp_path / f"{name}.onnx")
    rejects("called fp16 but none of its", build, graphs.path("tiny", "fp32"), precision="fp16")


@pytest.mark.slow("engine")
def test_build_reports_progress_and_stops_on_ctrl_c(graphs: Graphs) -> None:
    steps: list[tuple[str, int, int]] = []
    choices = BuildOptions(backend="tensorrt-rtx", profiles=BATCHES, sms=("86",))
    build_engine(graphs.path("tiny"), choices, progress=lambda *step: steps.append(step))
    assert "Building engine" in {phase for phase, _, _ in steps}
    assert all(1 <= done <= total for _, done, total in steps)

    def press_ctrl_c(phase: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine(graphs.path("tiny"), choices, progress=press_ctrl_c)
    pressed: list[str] = []

    def signal_once(phase: str, done: int, total: int) -> None:
        if not pressed:
            pressed.append(phase)
            signal.raise_signal(signal.SIGINT)

    # SIGINT is ignored in tests that a shell starts in the background, and Python would then raise nothing.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            build_engine(graphs.path("tiny"), choices, progress=signal_once)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"timing_cache": Path("t.cache")}, "timing cache: TensorRT-RTX picks kernels on the target"),
        ({"optimization_level": 3}, "same plan at every level"),
        ({"version_compatible": True}, "rebuild for each version"),
        ({"sparse": True}, "same plan with and without"),
        ({"sms": ("90",)}, "'90' is no target"),
        ({"sms": ("86", "86")}, "each target once"),
        ({"sms": ("86", "portable")}, "portable alone"),
        ({"backend": "tensorrt", "sms": ("86",)}, "builds for the GPU it runs on"),
    ],
)
def test_meaningless_options_are_refused(options: dict[str, object], says: str) -> None:
    rejects(says, BuildOptions, **{"backend": "tensorrt-rtx", **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "1:2", "8:4:16", "0:1:2", "a:b:c", "1:8:64:2", "-1"])
def test_invalid_batches_are_refused(text: str) -> None:
    rejects("batch", BatchProfile.from_text, text)


@pytest.mark.slow("engine")
def test_memory_is_reported_per_profile_without_a_gpu(graphs: Graphs) -> None:
    """Each FP16 weight takes two bytes, and a profile takes as much memory as its largest batch."""
    path = graphs.path("tiny")
    several = build(path, profiles=tuple(map(BatchProfile.from_text, ("1", "8", "64")))).record
    assert several.memory.reason is None
    small, middle, large = some(several.memory.activations_bytes)
    assert small < middle < large
    assert list(several.device_memory_bytes) == ["1:1:1", "8:8:8", "64:64:64"]
    weights = sum(np.prod(tensor.dims) for tensor in onnx.load(path).graph.initializer if tensor.data_type == 10)
    alone = build(path, profiles=(BatchProfile.from_text("8"),)).record
    assert 2 * weights <= some(alone.memory.weights_bytes) <= 2 * weights + 500_000
    assert alone.memory.activations_bytes == (middle,)
    static = build(graphs.path("tiny", "fp16", "", 4), profiles=()).record
    assert list(static.device_memory_bytes) == ["4:4:4"]


@pytest.mark.slow("engine")
def test_additional_targets_enlarge_the_plan_and_portable_ones_do_not(graphs: Graphs, tmp_path: Path) -> None:
    """A plan for SM75 holds kernels of its own, and targets from SM80 on share theirs."""
    path, asked = graphs.path("tiny"), {"backend": "tensorrt-rtx", "profiles": BATCHES}
    several = BuildOptions(**asked, sms=("75", "86"), compatibility="targets")  # type: ignore[arg-type]
    price = build_priced(path, several, tmp_path / "m.plan").record.compatibility
    assert price is not None
    assert [plan.target for plan in price.plans] == ["sm75", "sm86"]
    assert price.own.plan_bytes > price.plans[1].plan_bytes == (tmp_path / "m.sm86.plan").stat().st_size
    portable = BuildOptions(**asked, compatibility="portable")  # type: ignore[arg-type]
    price = build_priced(path, portable, tmp_path / "p.plan").record.compatibility
    assert price is not None
    assert [plan.target for plan in price.plans] == ["sm80", "sm86", "sm89", "sm120"]
    assert {plan.kernels for plan in price.plans} == {price.own.kernels}
    assert record_of_plan(tmp_path / "p.plan").compatibility == price
