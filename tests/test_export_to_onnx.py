"""Exported graphs: outputs, types, site names, metadata, byte-identical files and refusals."""

import copy
import hashlib
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import onnx
import pytest
import torch
from google.protobuf.message import EncodeError
from numpy.typing import NDArray
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.nn import functional

from export.graph import to_onnx
from export.graph.precision import kept_modules, typed_copy
from export.graph.to_onnx import onnx_bytes, save_onnx
from export.graph.weights import declared_types, notes_of, weight_shares
from ground.errors import BadInput
from ground.ports import image_port
from tests.export_vit import SHAPE, Vit, export, images, input_types
from tests.graphs import session_of
from tests.refusals import rejects


def run(proto: onnx.ModelProto, images: NDArray[np.float32]) -> NDArray[np.float32]:
    logits: NDArray[np.float32] = session_of(proto).run(["logits"], {"images": images})[0]
    return logits


def run_in_real_half(proto: onnx.ModelProto, batch: NDArray[np.float32]) -> NDArray[np.float32]:
    """Run a graph in NumPy, which rounds after each operator; ONNX Runtime on the CPU would hide float16 overflow."""
    with np.errstate(all="ignore"):
        outputs = cast(list[NDArray[np.float32]], ReferenceEvaluator(proto).run(["logits"], {"images": batch}))
    return outputs[0]


def exact(model: nn.Module, batch: NDArray[np.float32]) -> NDArray[np.float64]:
    with torch.no_grad():
        out: NDArray[np.float64] = copy.deepcopy(model).double()(torch.from_numpy(batch).double()).numpy()
    return out


def relative_error(got: NDArray[np.float32], wanted: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.fixture(scope="module")
def model() -> Vit:
    return Vit(qk=16, padded=True)


@pytest.fixture(scope="module")
def fp16(model: Vit) -> onnx.ModelProto:
    return export(model, "fp16", metadata={"widths": "qk 16"})


@pytest.mark.slow("graph")
@pytest.mark.parametrize("opset", [20, 23])
def test_fp32_agrees_with_float64_at_every_batch(model: Vit, opset: int) -> None:
    proto = export(model, opset=opset)
    assert [entry.version for entry in proto.opset_import] == [opset]
    for batch in (1, 3):
        assert relative_error(run(proto, images(batch)), exact(model, images(batch))) < 1e-5
    assert weight_shares(proto) == {"float32": 1.0}


@pytest.mark.slow("graph")
def test_fp16_graph_is_close_and_stores_float16(model: Vit, fp16: onnx.ModelProto) -> None:
    for runner in (run, run_in_real_half):
        assert 1e-6 < relative_error(runner(fp16, images(4)), exact(model, images(4))) < 5e-3
    assert weight_shares(fp16) == {"float16": 1.0}
    assert [fp16.graph.input[0].type.tensor_type.elem_type, fp16.graph.output[0].type.tensor_type.elem_type] == [1, 1]


def test_softmax_and_layernorm_of_an_fp16_graph_compute_in_float32(fp16: onnx.ModelProto) -> None:
    assert input_types(fp16, "Softmax", "LayerNormalization") == {TensorProto.FLOAT}
    assert input_types(fp16, "MatMul") == {TensorProto.FLOAT16}
    assert sum(node.op_type == "LayerNormalization" for node in fp16.graph.node) == 5


@pytest.mark.slow("graph")
def test_mixed_keeps_a_block_that_overflows_float16() -> None:
    model = Vit()
    with torch.no_grad():
        model.blocks[1].mlp.fc1.bias += 6e4  # type: ignore[union-attr,operator]
        model.blocks[1].mlp.fc1.weight *= 3e4  # type: ignore[union-attr,operator]
        model.blocks[1].mlp.fc2.weight *= 1e-5  # type: ignore[union-attr,operator]
    wanted = exact(model, images(4))
    assert not np.isfinite(run_in_real_half(export(model, "fp16"), images(4))).any()
    proto = export(model, "mixed", keep_fp32=["blocks.1.mlp"])
    assert relative_error(run_in_real_half(proto, images(4)), wanted) < 5e-3
    assert input_types(proto, "Gelu") == {TensorProto.FLOAT, TensorProto.FLOAT16}
    assert 0.5 < weight_shares(proto)["float16"] < 1.0


@pytest.mark.slow("graph")
def test_keeping_all_children_keeps_the_module_with_its_residual() -> None:
    kept = kept_modules(Vit(depth=2), ["blocks.1.*"])
    assert {"blocks.1", "blocks.1.attn.qkv"} <= kept
    assert not any(name.startswith("blocks.0") for name in kept)
    proto = export(Vit(), "mixed", keep_fp32=["blocks.1.*"])
    types = declared_types(onnx.shape_inference.infer_shapes(proto).graph)
    added = {node.name: types[node.output[0]] for node in proto.graph.node if node.op_type == "Add"}
    assert added["blocks.1/Add_1"] == TensorProto.FLOAT
    assert added["blocks.0/Add_1"] == TensorProto.FLOAT16


def test_kept_site_includes_its_children_but_no_site_with_the_same_prefix() -> None:
    kept = kept_modules(Vit(depth=12), ["blocks.1"])
    assert {"blocks.1", "blocks.1.attn.qkv", "blocks.1.mlp.fc2"} <= kept
    assert all(name == "blocks.1" or name.startswith("blocks.1.") for name in kept)
    assert "blocks.10.mlp" in kept_modules(Vit(depth=12), ["blocks.1*"])


def test_node_names_are_unique_and_carry_the_site(fp16: onnx.ModelProto) -> None:
    names = [node.name for node in fp16.graph.node]
    assert len(set(names)) == len(names)
    for name in ("blocks.0.attn/MatMul", "blocks.1.attn/MatMul_1", "blocks.1.attn.qkv/MatMul", "blocks.0.mlp.act/Gelu"):
        assert name in names
    attention = [node.name for node in fp16.graph.node if node.op_type in ("Split", "Softmax", "Pad")]
    assert all(".attn/" in name for name in attention), attention
    text = onnx_bytes(fp16)
    for trace in (b"pkg.torch", b".py", str(Path.cwd()).encode(), b"val_", b"_hook"):
        assert trace not in text, trace


def test_each_weight_is_stored_once_and_parameters_keep_their_names(fp16: onnx.ModelProto) -> None:
    stored = [(tensor.data_type, tuple(tensor.dims), tensor.raw_data) for tensor in fp16.graph.initializer]
    assert len(set(stored)) == len(stored)
    names = {tensor.name for tensor in fp16.graph.initializer}
    assert {"patch.weight", "head.bias", "blocks.0.attn.qkv.bias", "blocks.0.attn.qkv/MatMul.1"} <= names


def test_metadata_is_sorted_and_includes_the_users(fp16: onnx.ModelProto) -> None:
    entries = notes_of(fp16)
    assert list(entries) == sorted(entries)
    assert (entries["widths"], entries["export.precision"], entries["export.opset"]) == ("qk 16", "fp16", "20")
    assert entries["export.torch"].startswith(torch.__version__.partition("+")[0])


def test_batch_is_symbolic_or_fixed(fp16: onnx.ModelProto) -> None:
    assert fp16.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    static = export(Vit(depth=1), batch=4)
    assert static.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 4
    assert run(static, images(4)).shape == (4, 10)


def test_export_leaves_the_model_unchanged() -> None:
    model = Vit(depth=1).train()
    before = copy.deepcopy(model.state_dict())
    export(model, "fp16")
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(tensor.dtype == torch.float32 for tensor in model.state_dict().values())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.slow("process")
def test_export_is_byte_identical_across_processes(fp16: onnx.ModelProto, tmp_path: Path) -> None:
    save_onnx(fp16, tmp_path / "here.onnx")
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.export_vit import *; from export.graph.to_onnx import save_onnx\n"
        "save_onnx(export(Vit(qk=16, padded=True), 'fp16', metadata={'widths': 'qk 16'}), Path(sys.argv[1]))"
    )
    there = tmp_path / "there.onnx"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(there)], cwd=Path(__file__).parent.parent,
        env={"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "here.onnx", there)]
    assert digests[0] == digests[1]


class Branching(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.mean((2, 3)) if images.sum() > 0 else images.amax((2, 3))


class OneSize(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.mean((2, 3)) * (2.0 if images.shape[0] == 2 else 1.0)


class Tokens(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(2)


class Pair(nn.Module):
    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return images.mean((2, 3)), images.amax((2, 3))


def with_weight(value: float) -> Vit:
    model = Vit(depth=1)
    model.head.weight.data[0, 0] = value
    return model


class SpelledOut(nn.Module):
    """A root mean square norm as single operators, as torch exports one that it doesn't widen to float32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x / ((x * x).mean(-1, keepdim=True) + 1e-3).sqrt() * self.weight


def with_norms(norm: Callable[[int], nn.Module]) -> Vit:
    """Make a model of one block with these norms."""
    model = Vit(depth=1)
    for name in ("norm1", "norm2"):
        model.blocks[0].register_module(name, norm(64))
    return model.eval()


@pytest.mark.slow("graph")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_rms_norm_stays_one_float32_operator(precision: str) -> None:
    model = with_norms(nn.RMSNorm)
    proto = export(model, precision)
    assert proto.opset_import[0].version == 23
    assert sum(node.op_type == "RMSNormalization" for node in proto.graph.node) == 2
    assert input_types(proto, "RMSNormalization") == {TensorProto.FLOAT}
    if precision != "bf16":  # ONNX Runtime multiplies no BF16 on the CPU, and opset 20 has no BF16 convolution
        assert relative_error(run(proto, images(4)), exact(model, images(4))) < (1e-5 if precision == "fp32" else 5e-3)
        spelled = export(model, precision, opset=20)
        assert not any(node.op_type == "RMSNormalization" for node in spelled.graph.node)


@pytest.mark.slow("graph")
def test_opset_is_the_lowest_sufficient_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """If opset 20 spells norms out in float16, the default becomes 23, and an explicit 20 is refused."""
    trace, spelled = to_onnx._trace, typed_copy(with_norms(SpelledOut), "fp16")
    traced: dict[tuple[int, type[nn.Module]], onnx.ModelProto] = {}

    def spelling_out(
        model: nn.Module, samples: dict[str, Tensor], outputs: int, *, opset: int, dynamic: bool
    ) -> onnx.ModelProto:
        model = spelled if opset == 20 else model
        key = opset, type(model.get_submodule("blocks.0.norm1"))
        if key not in traced:
            traced[key] = trace(model, samples, outputs, opset=opset, dynamic=dynamic)
        return copy.deepcopy(traced[key])

    monkeypatch.setattr(to_onnx, "_trace", spelling_out)
    proto = export(with_norms(nn.RMSNorm), "fp16")
    assert proto.opset_import[0].version == 23
    assert notes_of(proto)["export.opset"] == "23"
    rejects(r"2 norms are spelled out in float16 .*\n.*--opset 23", export, with_norms(nn.RMSNorm), "fp16", opset=20)
    with pytest.raises(BadInput, match="2 norms are spelled out") as refused:
        export(with_norms(SpelledOut), "fp16")
    assert "--opset 23" not in str(refused.value)


@pytest.mark.slow("graph")
@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        (Vit(depth=1), {"precision": "int8"}, "'int8' is unknown"),
        (Vit(depth=1), {"precision": "mixed"}, "at least one keep_fp32 pattern"),
        (
            Vit(depth=1),
            {"precision": "fp16", "keep_fp32": ["blocks.0"]},
            "precision mixed or mixed-bf16, got fp16",
        ),
        (Vit(depth=1), {"precision": "mixed", "keep_fp32": ["blocks.7.*", "head"]}, "'blocks.7.\\*' fits no module"),
        (Vit(depth=1), {"precision": "mixed", "keep_fp32": ["*"]}, "none of its 6 weight matrices is float16"),
        (Vit(depth=1), {"port": image_port((3, 24, 24))}, "refuses images of shape \\[2, 3, 24, 24\\]"),
        (Vit(depth=1), {"port": image_port((3, 0, 24))}, "the shape behind the batch needs sizes of at least 1"),
        (Vit(depth=1), {"metadata": {"command": "reduce --weights /home/me/w.pth"}}, "local path"),
        (with_weight(float("nan")), {}, "head.weight holds NaN or Inf"),
        (with_weight(1e6), {"precision": "fp16"}, "head.weight: the largest weight is 1e\\+06.*keep_fp32 'head'"),
        (Branching(), {}, "can't trace"),
        (OneSize(), {}, "can't trace|came out fixed"),
        (Tokens(), {}, "logits must have rank 1 or 2.*export a model whose output is pooled"),
        (Pair(), {}, "expected one output named 'logits', found"),
    ],
)
def test_invalid_requests_are_refused_with_the_reason(model: nn.Module, options: dict[str, object], says: str) -> None:
    rejects(says, export, model, **options)  # type: ignore[arg-type]


def test_float32_bound_that_clips_nothing_is_not_a_fault() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("most", torch.tensor(float("inf")))
    assert typed_copy(model, "fp16").get_buffer("most").isinf()
    model.register_buffer("least", torch.tensor(float("nan")))
    rejects("least holds NaN", typed_copy, model, "fp16")


class Attended(nn.Module):
    """Attention with any leading axes and a mask, on numbers that are clamped between tensors."""

    def __init__(self, front: tuple[int, ...], mask: tuple[int, ...]) -> None:
        super().__init__()
        self.front, self.linear = front, nn.Linear(3, 24)
        self.register_buffer("low", torch.tensor(-1.0))
        self.register_buffer("high", torch.tensor(1.0))
        self.register_buffer("least", torch.randn(3))
        self.register_buffer("mask", torch.randn(mask))

    def forward(self, images: Tensor) -> Tensor:
        low, high, least = (self.get_buffer(name) for name in ("low", "high", "least"))
        x = images[:, :, 0, : math.prod(self.front) * 6].transpose(1, 2)
        x = torch.clamp(torch.clamp(x, low, high) + torch.clamp(x, low, high / 2), least)
        q, k, v = self.linear(x).reshape(len(x), *self.front, 6, 24).chunk(3, -1)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=self.get_buffer("mask")).flatten(1)


@pytest.mark.slow("graph")
@pytest.mark.parametrize("opset", [None, 23])
@pytest.mark.parametrize(
    ("front", "mask"),
    [((), (6, 6)), ((), (1, 6, 6)), ((2, 2), (2, 6, 6)), ((2, 2), (1, 2, 1, 6, 6)), ((2, 1, 2), (1, 2, 6, 6))],
)
def test_attention_accepts_any_leading_axes(front: tuple[int, ...], mask: tuple[int, ...], opset: int | None) -> None:
    torch.manual_seed(0)
    model, batch = Attended(front, mask).eval(), images(3)
    assert relative_error(run(export(model, opset=opset), batch), exact(model, batch)) < 1e-6


class Padded(nn.Module):
    """Attention that masks the keys of inputs that are not positive, except the first key."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 24)

    def forward(self, images: Tensor) -> Tensor:
        x_BNC = images[:, :, 0, :6].mT
        seen_B11N = ((x_BNC[..., 0] > 0.0) | (torch.arange(6) == 0))[:, None, None]
        q, k, v = self.linear(x_BNC).unsqueeze(1).chunk(3, -1)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen_B11N).flatten(1)


@pytest.mark.slow("graph")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_boolean_mask_has_no_guard_behind_the_softmax(precision: str) -> None:
    """An engine fuses attention only if its softmax is an input of the product with the values."""
    torch.manual_seed(0)
    model, batch = Padded().eval(), images(3)
    graph = export(model, precision)
    assert "IsNaN" not in {node.op_type for node in graph.graph.node}
    assert relative_error(run(graph, batch), exact(model, batch)) < (1e-6 if precision == "fp32" else 2e-3)


@pytest.mark.slow("graph")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_zero_padding_before_a_pool_stays_a_separate_pad(precision: str) -> None:
    """ONNX Runtime would fuse both into a pool that pads with minus infinity instead of zeros."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConstantPad2d(1, 0.0), nn.MaxPool2d(3, 2), nn.Flatten()).eval()
    with torch.no_grad():
        cast(Tensor, model[0].bias).sub_(3.0)
    batch = images(3)
    error = relative_error(run(export(model, precision), batch), exact(model, batch))
    assert error < (1e-6 if precision == "fp32" else 2e-3)


def test_graph_too_large_for_one_file_is_refused() -> None:
    def refuses(**_: object) -> bytes:
        raise EncodeError("Failed to serialize proto")

    proto = SimpleNamespace(SerializeToString=refuses)
    rejects("more bytes than a single ONNX file may", onnx_bytes, proto)  # type: ignore[arg-type]


def test_weights_beyond_one_file_are_refused_before_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_onnx, "MAX_BYTES", 4 * 12 * 8 - 1)
    tied = nn.Sequential(nn.Linear(12, 8, bias=False), nn.Linear(12, 8, bias=False))
    tied[1].weight = tied[0].weight
    rejects("give precision fp16 or bf16", to_onnx.require_size, tied, "fp32")
    rejects("the weights take 384 bytes in int8", to_onnx.require_size, tied, "int8")
    to_onnx.require_size(tied, "fp16")
    monkeypatch.setattr(to_onnx, "MAX_BYTES", 4 * 12 * 8 + 1)
    to_onnx.require_size(tied, "fp32")  # weights in two places are stored once
    monkeypatch.setattr(to_onnx, "MAX_BYTES", 10)
    rejects("take a smaller model", to_onnx.require_size, tied, "fp16")


def test_typed_copy_casts_inputs_and_outputs() -> None:
    typed = typed_copy(Vit(), "fp16")
    assert typed(torch.zeros(1, *SHAPE)).dtype == torch.float32
    halves = {name for name, tensor in typed.state_dict().items() if tensor.dtype == torch.float16}
    assert "blocks.0.mlp.fc1.weight" in halves
    assert not any("norm" in name for name in halves)
