"""What is read from a builder's log, and when a reduced engine counts as having lost its fused attention."""

import pytest

from export.engine.audit import Audit, AuditedEngine
from export.engine.fusion import Fusion, Kernel, kernels_from_inspector, kernels_from_log, site_of
from ground.errors import BadInput

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
    fusion = Fusion(kernels=kernels, attention_sites=("b.0", "b.1"))
    assert (fusion.fused_sites, fusion.half_kernel_share) == (("b.0",), 2 / 3)
    assert fusion.kernel_types == {"float16": 2 / 3, "float32": 1 / 3}
    assert fusion.kinds == {"gemm": 1, "kgen": 2, "shape_call": 1}
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
def test_what_counts_as_fused_attention(name: str, kind: str, tactic: str, fused: bool) -> None:
    assert kernel("b", name, kind, tactic).is_fused_attention == fused


def test_every_profile_has_to_be_fused() -> None:
    kernels = (kernel("b.0"), kernel("b.0"), kernel("b.1"))
    assert Fusion(kernels=kernels, attention_sites=("b.0", "b.1"), profiles=2).fused_sites == ("b.0",)


def audited(fused: list[str], sites: list[str]) -> AuditedEngine:
    fusion = Fusion(kernels=tuple(kernel(site) for site in fused), attention_sites=tuple(sites))
    return AuditedEngine(fusion=fusion, plan_bytes=1, build_seconds=0.0, memory_bytes={})


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
def test_an_audit_fails_for_blocks_that_lost_what_they_had(
    dense: list[str], reduced: list[str], left: list[str], lost: tuple[str, ...]
) -> None:
    audit = Audit(
        backend="tensorrt-rtx",
        library_version="1",
        target="86",
        dense=audited(dense, ["b.0", "b.1"]),
        reduced=audited(reduced, left),
    )
    assert (audit.lost, audit.passed) == (lost, not lost)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"Layers": ["name"]}'])
def test_an_inspector_answer_without_layers_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"inspector|names only"):
        kernels_from_inspector(text)


def test_a_site_is_what_stands_before_the_operator() -> None:
    assert [site_of(name) for name in ("blocks.3.attn/MatMul_1", "Cast")] == ["blocks.3.attn", ""]
