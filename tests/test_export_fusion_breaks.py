"""Fusion breaks in graphs, engines and repositories, the search for the fewest of them, and kernels in builder logs."""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.proof.engine_search import RepairResult, find_break_places, find_fewest_passing
from corp_deploy.proof.kept_sites import find_sites_to_keep
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, save
from corp_deploy.store.graph_facts import facts_of_onnx
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.traced.models.narrowed_model import at_widths
from export.engine.audit import Audit
from export.engine.fusion import Kernel, fusion_fields, kernels_from_inspector, kernels_from_log
from export.engine.record import EngineRecord
from export.graph.check import check_onnx
from export.graph.fusion_breaks import breakable_sites, with_fusion_breaks
from export.graph.ports import ports_of_graph
from export.triton.config import ServedModel, Serving, config_text
from export.triton.signature import signature_from_onnx
from ground.errors import BadInput
from ground.feeds import Outputs
from ground.ports import FUSION_BREAK
from perf.runners.onnx import OnnxRunner
from tests.command import invoked, refuses
from tests.doubles import some
from tests.export_served import engine_record
from tests.export_vit import Vit, export
from tests.graphs import built, needs_rtx, session_of
from tests.refusals import rejects

ARCHITECTURE = Architecture(
    name="vit_tiny_patch16_224",
    kwargs={"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 5},
)
IMAGES = np.random.default_rng(0).standard_normal((6, 3, 32, 32)).astype(np.float32)


@pytest.fixture(scope="module")
def graph() -> onnx.ModelProto:
    return export(Vit(depth=2), "fp16")


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    torch.manual_seed(0)
    return Checkpoint(model=dense_from_architecture(ARCHITECTURE).eval(), architecture=ARCHITECTURE, lineage={})


def module_output(model: nn.Module, name: str, images: np.ndarray) -> np.ndarray:
    """Return the output of a module in a forward pass of its model."""
    got: list[torch.Tensor] = []
    handle = model.get_submodule(name).register_forward_hook(lambda _, __, output: got.append(output))
    with torch.no_grad():
        model(torch.from_numpy(images))
    handle.remove()
    return got[0].numpy()


@pytest.mark.slow("graph")
@pytest.mark.parametrize("site", ["blocks.0", "blocks.1", "blocks.0.attn", "blocks.1.mlp", "blocks.0.mlp.fc1", "norm"])
def test_fusion_break_outputs_equal_the_modules(checkpoint: Checkpoint, tmp_path: Path, site: str) -> None:
    export_checkpoint(checkpoint, tmp_path / "g.onnx", precision="fp32", breaks=[site])
    (output,) = session_of(tmp_path / "g.onnx").run([FUSION_BREAK + site], {"images": IMAGES})
    np.testing.assert_allclose(output, module_output(checkpoint.model, site, IMAGES), atol=1e-4)
    assert facts_of_onnx(tmp_path / "g.onnx").fusion_breaks == (site,)


def test_fusion_breaks_leave_the_graph_unchanged_for_other_readers(graph: onnx.ModelProto, tmp_path: Path) -> None:
    broken = with_fusion_breaks(graph, ["blocks.*.attn", "blocks.1.attn/Softmax"])
    assert check_onnx(broken) == []
    assert [port.name for port in ports_of_graph(broken)[1]] == ["logits"]
    names = [port.name.removeprefix(FUSION_BREAK) for port in ports_of_graph(broken, breaks=True)[1]]
    assert names == ["blocks.0.attn", "blocks.1.attn/Softmax", "blocks.1.attn"]
    assert with_fusion_breaks(graph, []) is graph
    assert len(graph.graph.output) == 1
    for name, proto in (("plain", graph), ("broken", broken)):
        onnx.save(proto, tmp_path / f"{name}.onnx")
    answers = {}
    for name in ("plain", "broken"):
        with OnnxRunner(tmp_path / f"{name}.onnx") as runner:
            assert [port.name for port in runner.outputs] == ["logits"]
            answers[name] = runner({"images": IMAGES})
            assert runner.bind({"images": IMAGES}).laps(2, itertools.count().__next__).calls == 2
    assert list(answers["broken"]) == ["logits"]
    np.testing.assert_array_equal(answers["plain"]["logits"], answers["broken"]["logits"])


@pytest.mark.slow("graph")
def test_attention_with_computed_shapes_can_be_broken(checkpoint: Checkpoint) -> None:
    """A reduced model reshapes its keys by shapes that the graph computes."""
    exported = traced_model.exportable(at_widths(checkpoint.model, {"blocks.1.attn.qk": 16, "blocks.1.mlp": 64}))
    broken = with_fusion_breaks(export(exported, "fp16"), ["*.attn/Softmax"])
    assert [port.shape for port in ports_of_graph(broken, breaks=True)[1]] == [("batch", 2, 17, 17)] * 2


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("blocks.7", r"'blocks.7': fits no module and no node; name a module, such as blocks.0"),
        ("head", r"'head': the value of head is an output already"),
        ("blocks.0.attn/Nothing", "fits no module and no node"),
        ("blocks.0.attn/MatMul_9", r"or a node, such as blocks.0.attn/Softmax"),
    ],
)
def test_invalid_breaks_are_refused(graph: onnx.ModelProto, pattern: str, reason: str) -> None:
    rejects(reason, with_fusion_breaks, export(Vit()) if pattern == "head" else graph, [pattern])


def test_repository_declares_breaks_only_for_plans(graph: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(with_fusion_breaks(graph, ["blocks.0.attn"]), tmp_path / "g.onnx")
    signature = signature_from_onnx(tmp_path / "g.onnx")
    model = ServedModel(
        name="m", backend="tensorrt", kind="KIND_GPU", signature=signature, max_batch=8, cc_filenames={}
    )
    assert FUSION_BREAK + "blocks.0.attn" in config_text(model, Serving(), 1, labelled=False)
    assert FUSION_BREAK not in config_text(replace(model, backend="onnxruntime"), Serving(), 1, labelled=False)


def record_of(graph: onnx.ModelProto, path: Path, target: str) -> EngineRecord:
    onnx.save(graph, path)
    return built(path, "1:8:64", target)


@pytest.mark.slow("engine")
@needs_rtx
@pytest.mark.parametrize("target", ["86", "89"])
def test_builder_does_not_fuse_across_a_break(graph: onnx.ModelProto, tmp_path: Path, target: str) -> None:
    plain = record_of(graph, tmp_path / "plain.onnx", target)
    inside = record_of(with_fusion_breaks(graph, ["blocks.0.attn/Softmax"]), tmp_path / "inside.onnx", target)
    behind = record_of(with_fusion_breaks(graph, ["blocks.0.attn"]), tmp_path / "behind.onnx", target)
    assert plain.fused_attention_sites == ("blocks.0.attn", "blocks.1.attn")
    assert inside.fused_attention_sites == ("blocks.1.attn",)
    assert behind.fused_attention_sites == ("blocks.0.attn", "blocks.1.attn")
    assert some(plain.kernels) <= some(behind.kernels) < some(inside.kernels)  # equal before RTX 1.7
    assert [port.name for port in inside.outputs] == ["logits"]
    assert [port.name for port in inside.fusion_breaks] == [FUSION_BREAK + "blocks.0.attn/Softmax"]
    assert some(inside.memory.activations_bytes)[0] > some(plain.memory.activations_bytes)[0]


def test_search_finds_the_fewest_breaks() -> None:
    sites = [f"s{index}" for index in range(7)]
    for needed in itertools.chain.from_iterable(itertools.combinations(sites, count) for count in range(4)):
        tried: list[int] = []

        def passes(some: Sequence[str], needed: tuple[str, ...] = needed, tried: list[int] = tried) -> bool:
            tried.append(len(some))
            return set(needed) <= set(some)

        assert find_fewest_passing(sites, passes) == needed
        assert len(tried) <= 2 + len(needed) * 4
    assert find_fewest_passing(sites, lambda some: False) is None


class WrongKernels:
    """Fake engines with noisy kernels: a break or float32 repairs those at `wrong`, only float32 those at `beyond`."""

    def __init__(self, wrong: tuple[str, ...], beyond: tuple[str, ...] = ()) -> None:
        self.wrong, self.beyond, self.built = wrong, beyond, list[tuple[str, ...]]()

    def __call__(self, path: Path) -> Outputs:
        proto = onnx.load(str(path))
        notes = {entry.key: entry.value.split() for entry in proto.metadata_props}
        kept, broken = notes.get("export.keep_fp32", []), notes.get("export.fusion_breaks", [])
        self.built.append((*kept, "-", *broken))
        spoilt = [site for site in self.wrong if site not in broken and site.partition("/")[0] not in kept]
        spoilt += [site for site in self.beyond if site not in kept]
        with OnnxRunner(path) as runner:
            logits = runner({"images": IMAGES})["logits"]
        noise = np.random.default_rng(1).standard_normal(logits.shape).astype(np.float32)
        return {"logits": logits + noise * len(spoilt)}


@pytest.mark.slow("graph")
@pytest.mark.parametrize(
    ("engines", "breaks", "kept"),
    [
        (WrongKernels(()), (), ()),
        (WrongKernels(("blocks.1.attn/Softmax",)), ("blocks.1.attn/Softmax",), ()),
        (WrongKernels(("blocks.0.mlp", "blocks.1.attn")), ("blocks.0.mlp", "blocks.1.attn"), ()),
        (WrongKernels((), beyond=("blocks.1.mlp",)), (), ("blocks.1.mlp",)),
    ],
)
def test_breaks_are_tried_before_fp32(
    checkpoint: Checkpoint, engines: WrongKernels, breaks: tuple[str, ...], kept: tuple[str, ...]
) -> None:
    found = find_sites_to_keep(checkpoint, checkpoint, {"images": IMAGES}, engines=engines, opset=None)
    assert (found.breaks, found.kept) == (breaks, kept)
    assert isinstance(found, RepairResult)
    assert len(set(engines.built)) == len(engines.built), "each engine is built once"


@pytest.mark.slow("engine")
def test_engine_that_no_break_repairs_is_refused(checkpoint: Checkpoint) -> None:
    engines = WrongKernels((), beyond=("patch_embed",))
    message = "no set of fusion breaks, and no set of blocks in more bits, repairs this engine"
    with pytest.raises(BadInput, match=message):
        find_sites_to_keep(checkpoint, checkpoint, {"images": IMAGES}, engines=engines, opset=None)


def test_candidates_follow_the_order_of_the_graph(graph: onnx.ModelProto) -> None:
    sites = find_break_places(graph)
    assert sites.index("blocks.0.attn/Softmax") < sites.index("blocks.0.attn") < sites.index("blocks.0.mlp")
    assert sites.index("blocks.0.mlp") < sites.index("blocks.1.attn/Softmax")
    assert breakable_sites(graph, ["blocks.0.attn"]) == ("blocks.0.attn",)


@pytest.mark.slow("graph")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, which would build engines")
def test_engines_are_judged_on_a_machine_with_a_gpu(checkpoint: Checkpoint, tmp_path: Path) -> None:
    save(checkpoint, tmp_path / "m")
    np.save(tmp_path / "images.npy", IMAGES)
    words = ["--model", tmp_path / "m", "-o", tmp_path / "g.onnx", "--images", tmp_path / "images.npy", "--auto"]
    for precision in ("mixed", "int8"):
        result = invoked("export", *words, "--precision", precision, "--engine", "tensorrt", code=4)
        assert re.search("takes a GPU.*leave --engine out", " ".join(result.output.split()))


@pytest.mark.slow("graph")
def test_build_command_adds_breaks(checkpoint: Checkpoint, tmp_path: Path) -> None:
    save(checkpoint, tmp_path / "m")
    words = ["export", "--model", tmp_path / "m", "-o", tmp_path / "g.onnx", "--precision", "fp32,fp16"]
    result = invoked(*words, "--break-fusion", "blocks.0.attn, blocks.1", "--json")
    rows = json.loads(result.stdout)["written"]
    assert [row["fusion_breaks"] for row in rows] == [["blocks.0.attn", "blocks.1"]] * 2
    for bad, reason in (
        (["--break-fusion", "blocks.9"], "fits no module and no node"),
        (["--break-fusion", ","], "--break-fusion has an empty name"),
        (
            ["--engine", "tensorrt"],
            "--engine tensorrt has no effect on precision fp32; it affects precision mixed that finds",
        ),
    ):
        refuses(reason, *words, *bad)


# Kernels in builder logs, and reduced engines that lose fused attention

TENSOR = "{ Name: t, Dimensions: [-1,17,16], Strides: [16,-1,1], StrideOrder: [1,2,0], Datatype: %s, Format: x }"


def line(name: str, kind: str, tensor: str = "Half", tactic: str = "", metadata: str = "") -> str:
    inside = TENSOR % tensor if tensor else ""
    constant = TENSOR % "Float"
    return (
        f"Name: {name}, LayerType: {kind}, Inputs: [ {inside}], Constants: [ {constant}], Outputs: [ {inside}], "
        f"TacticName: {tactic}, StreamId: 0{metadata}"
    )


LOG = "\n".join(
    [
        "Parsing node: blocks.0.attn/MatMul [MatMul]",
        "Layers:",
        line("__mye1_0_myl0_0", "shape_call", tensor="", metadata=", Metadata: "),
        line("a_gemm_b", "gemm"),
        line("_gemm_mha_v2_myl0_7", "kgen", metadata=", Metadata: [ONNX Layer: b.0/MatMul_1][ONNX Layer: b.0/Softmax]"),
        line("stream", "wait"),
        line("__myl_Add_1", "kgen", tensor="Float", metadata=", Metadata: [ONNX Layer: b.1/Add]"),
        "I/O Tensors:",
        " Name: images, IOMode: Input, DataType: Float",
    ]
)


def test_kernels_are_read_from_the_log() -> None:
    kernels = kernels_from_log(LOG)
    assert [(kernel.name, kernel.kind, kernel.types) for kernel in kernels] == [
        ("__mye1_0_myl0_0", "shape_call", None),
        ("a_gemm_b", "gemm", {"float16"}),
        ("_gemm_mha_v2_myl0_7", "kgen", {"float16"}),
        ("__myl_Add_1", "kgen", {"float32"}),
    ]
    assert kernels[2].nodes == ("b.0/MatMul_1", "b.0/Softmax")
    assert [kernel.is_fused_attention for kernel in kernels] == [False, False, True, False]
    fusion = fusion_fields(kernels, ("b.0", "b.1"))
    assert (fusion["fused_attention_sites"], fusion["half_kernel_share"]) == (("b.0",), 2 / 3)
    assert fusion["kernel_types"] == {"float16": 2 / 3, "float32": 1 / 3}
    assert fusion["kernel_kinds"] == {"gemm": 1, "kgen": 2, "shape_call": 1}
    assert kernels_from_log("nothing here") == ()


def kernel(site: str, name: str = "_gemm_mha_v2_1", kind: str = "kgen", tactic: str = "") -> Kernel:
    return Kernel(name=name, kind=kind, tactic=tactic, types=frozenset({"float16"}), nodes=(f"{site}/Softmax",))


@pytest.mark.parametrize(
    ("name", "kind", "tactic", "fused"),
    [
        ("__mye8037_gemm_mha_v2", "kgen", "", True),
        ("_gemv_mha_v1_myl1_3", "kgen", "", True),
        ("x", "kgen", "_gemm_mha_v2_0x3c92", True),
        ("x", "fusion", "fmha_v2_fp16_64_64_sm86", True),
        ("x", "MultiHeadAttention", "", True),
        ("blocks.0.attention/Softmax", "kgen", "softmax", False),
        ("blocks.0.multi_head_attention/MatMul_myl0_1", "gemm", "sm80_xmma", False),
    ],
)
def test_kernel_names_that_count_as_fused_attention(name: str, kind: str, tactic: str, fused: bool) -> None:
    assert kernel("b", name, kind, tactic).is_fused_attention == fused


def test_every_profile_must_be_fused() -> None:
    kernels = (kernel("b.0"), kernel("b.0"), kernel("b.1"))
    assert fusion_fields(kernels, ("b.0", "b.1"), profiles=2)["fused_attention_sites"] == ("b.0",)


def audited(fused: list[str], sites: list[str]) -> EngineRecord:
    return engine_record(attention_sites=tuple(sites), fused_attention_sites=tuple(fused))


@pytest.mark.parametrize(
    ("dense", "reduced", "left", "lost"),
    [
        (["b.0", "b.1"], ["b.0", "b.1"], ["b.0", "b.1"], ()),
        (["b.0", "b.1"], ["b.1"], ["b.0", "b.1"], ("b.0",)),
        (["b.1"], ["b.1"], ["b.0", "b.1"], ()),
        (["b.1"], ["b.0"], ["b.0", "b.1"], ("b.1",)),  # the count is the same, the block is not
        (["b.0", "b.1"], ["b.1"], ["b.1"], ()),  # the reduced model has no attention left in b.0
        ([], [], ["b.0", "b.1"], ()),
    ],
)
def test_audit_fails_for_blocks_that_lost_their_kernel(
    dense: list[str], reduced: list[str], left: list[str], lost: tuple[str, ...]
) -> None:
    audit = Audit(target="86", dense=audited(dense, ["b.0", "b.1"]), reduced=audited(reduced, left))
    assert (audit.lost, audit.passed) == (lost, not lost)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"Layers": ["name"]}'])
def test_inspector_output_without_layers_is_refused(text: str) -> None:
    rejects(r"inspector|names only", kernels_from_inspector, text)
