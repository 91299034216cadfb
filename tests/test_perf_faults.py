"""Planted faults: each is found by the chain and its site is named; several pass a comparison on random inputs at 1e-2.

The tiny ViT is a torch module and, written node by node, an ONNX graph with the names that an export gives. Its images
have one bright patch, as photographs have structure; random inputs don't, which is why so much hides from them.
Legend: B images, T tokens, D width, K patch inputs.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from torch import Tensor, nn

from ground.feeds import Feeds
from perf.parity import block_outputs, structure, tolerance
from perf.parity.block_outputs import block_noise, headroom, locate_in_exact, locate_in_half
from perf.parity.locate import FaultLocation, keep_until_it_passes
from perf.parity.measures import measures
from perf.parity.parity import Link, link
from perf.parity.rounding import rounded_graph

D, HEADS, DEPTH, HIDDEN, CLASSES, PATCH_INPUTS = 32, 2, 3, 64, 10, 48
SCALE = 1 / math.sqrt(D // HEADS)
Array = NDArray[np.float32]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x_BTD: Tensor) -> Tensor:
        parts = self.q(x_BTD) * SCALE, self.k(x_BTD), self.v(x_BTD)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        out: Tensor = self.proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.fc1(x_BTD).relu())
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(D), Attention(), nn.LayerNorm(D), Mlp()

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.norm1(x_BTD))
        out: Tensor = x_BTD + self.mlp(self.norm2(x_BTD))
        return out


class TinyViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(PATCH_INPUTS, D)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(
            images.unflatten(2, (2, 4)).unflatten(4, (2, 4)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        )
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x).mean(1))
        return out


@dataclass
class Graph:
    """Builds the ONNX graph; modules outside `keep` are typed float16 when `half`."""

    half: bool
    keep: tuple[str, ...]
    scale: float = SCALE
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[TensorProto] = field(default_factory=list)

    def narrow(self, path: str) -> bool:
        return self.half and not any(f"{path}.".startswith(f"{kept}.") for kept in self.keep)

    def op(self, path: str, kind: str, *inputs: str, **attributes: Any) -> str:
        taken = sum(node.name.startswith(f"{path}/{kind}_") for node in self.nodes)
        name = f"{path}/{kind}_{taken}"
        self.nodes.append(helper.make_node(kind, list(inputs), [f"{name}:0"], name=name, **attributes))
        return f"{name}:0"

    def weight(self, path: str, value: NDArray[np.generic] | float) -> str:
        array = np.asarray(value, dtype=np.float16 if self.narrow(path) else np.float32)
        self.weights.append(numpy_helper.from_array(array, f"{path}.{len(self.weights)}"))
        return self.weights[-1].name

    def ints(self, *values: int) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(values, np.int64), f"ints.{len(self.weights)}"))
        return self.weights[-1].name

    def cast(self, path: str, x: str, *, half: bool) -> str:
        return self.op(path, "Cast", x, to=TensorProto.FLOAT16 if half else TensorProto.FLOAT)

    def inside(self, path: str, x: str, body: Callable[[str], str]) -> str:
        """Casts around a module that is kept in float32."""
        if not self.half or self.narrow(path):
            return body(x)
        return self.cast(path, body(self.cast(path, x, half=False)), half=True)

    def linear(self, path: str, x: str, layer: nn.Linear) -> str:
        product = self.op(path, "MatMul", x, self.weight(path, layer.weight.detach().numpy().T))
        return self.op(path, "Add", product, self.weight(path, layer.bias.detach().numpy()))

    def norm(self, path: str, x: str, layer: nn.LayerNorm) -> str:
        """Operator by operator, as engines without the fused operator see it: the square overflows first."""
        last = self.ints(-1)
        centred = self.op(path, "Sub", x, self.op(path, "ReduceMean", x, last))
        variance = self.op(path, "ReduceMean", self.op(path, "Mul", centred, centred), last)
        size = self.op(path, "Sqrt", self.op(path, "Add", variance, self.weight(path, layer.eps)))
        scaled = self.op(
            path, "Mul", self.op(path, "Div", centred, size), self.weight(path, layer.weight.detach().numpy())
        )
        return self.op(path, "Add", scaled, self.weight(path, layer.bias.detach().numpy()))

    def attention(self, path: str, x: str, layer: Attention) -> str:
        def split(t: str, *order: int) -> str:
            return self.op(
                path, "Transpose", self.op(path, "Reshape", t, self.ints(0, 4, HEADS, D // HEADS)), perm=order
            )

        q = self.op(path, "Mul", self.linear(f"{path}.q", x, layer.q), self.weight(path, self.scale))
        k, v = self.linear(f"{path}.k", x, layer.k), self.linear(f"{path}.v", x, layer.v)
        logits = self.op(path, "MatMul", split(q, 0, 2, 1, 3), split(k, 0, 2, 3, 1))
        mixed = self.op(path, "MatMul", self.op(path, "Softmax", logits, axis=-1), split(v, 0, 2, 1, 3))
        flat = self.op(path, "Reshape", self.op(path, "Transpose", mixed, perm=(0, 2, 1, 3)), self.ints(0, 4, D))
        return self.linear(f"{path}.proj", flat, layer.proj)

    def mlp(self, path: str, x: str, layer: Mlp) -> str:
        return self.linear(f"{path}.fc2", self.op(path, "Relu", self.linear(f"{path}.fc1", x, layer.fc1)), layer.fc2)


def add_block(g: Graph, at: str, x: str, block: Block) -> str:
    y = g.inside(f"{at}.norm1", x, lambda x: g.norm(f"{at}.norm1", x, block.norm1))
    x = g.op(at, "Add", x, g.inside(f"{at}.attn", y, lambda y: g.attention(f"{at}.attn", y, block.attn)))
    y = g.inside(f"{at}.norm2", x, lambda x: g.norm(f"{at}.norm2", x, block.norm2))
    return g.op(at, "Add", x, g.inside(f"{at}.mlp", y, lambda y: g.mlp(f"{at}.mlp", y, block.mlp)))


def onnx_from_vit(
    model: TinyViT, *, half: bool = False, keep: tuple[str, ...] = (), scale: float = SCALE
) -> ModelProto:
    g = Graph(half=half, keep=keep, scale=scale)
    x = g.op("patch_embed", "Reshape", "images", g.ints(0, 3, 2, 4, 2, 4))
    x = g.op("patch_embed", "Reshape", g.op("patch_embed", "Transpose", x, perm=(0, 2, 4, 1, 3, 5)), g.ints(0, 4, 48))
    x = g.cast("patch_embed", x, half=True) if half else x
    x = g.inside("patch_embed", x, lambda y: g.linear("patch_embed", y, model.patch_embed))
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        x = add_block(g, f"blocks.{i}", x, block)
    x = g.op("pool", "ReduceMean", g.inside("norm", x, lambda y: g.norm("norm", y, model.norm)), g.ints(1), keepdims=0)
    x = g.inside("head", x, lambda y: g.linear("head", y, model.head))
    last = helper.make_node("Identity", [x], ["logits"], name="Border")
    g.nodes.append(helper.make_node("Cast", [x], ["logits"], name="Border", to=TensorProto.FLOAT) if half else last)
    graph = helper.make_graph(
        g.nodes,
        "tiny",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])],
        g.weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


BRIGHT = np.random.default_rng(99).standard_normal((3, 4, 4)).astype(np.float32)
BRIGHT /= np.linalg.norm(BRIGHT)


def photographs(count: int = 48, seed: int = 1) -> Array:
    """Noise, and in one of the four patches a bright pattern."""
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((count, 3, 8, 8)).astype(np.float32)
    for place, at in enumerate(rng.integers(0, 4, count)):
        row, column = 4 * (at // 2), 4 * (at % 2)
        images[place, :, row : row + 4, column : column + 4] += 12 * (1 + 0.2 * rng.standard_normal()) * BRIGHT
    return images


def noise_images(count: int = 48) -> Array:
    return np.random.default_rng(2).standard_normal((count, 3, 8, 8)).astype(np.float32)


def dense_vit(seed: int = 0) -> TinyViT:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = TinyViT().eval()
    with torch.no_grad():
        model.head.weight.mul_(4)
    return model


@pytest.fixture(scope="module")
def vit() -> TinyViT:
    return dense_vit()


def fed(images: Array) -> Feeds:
    return {"images": images}


def torch_logits(model: TinyViT, images: Array) -> Array:
    with torch.inference_mode():
        out: Array = model(torch.from_numpy(images)).numpy()
    return out


def onnx_logits(model: ModelProto, images: Array) -> Array:
    """As an engine with these types would: the graph rounded where it says float16."""
    return plain_logits(rounded_graph(model), images)


def plain_logits(model: ModelProto, images: Array) -> Array:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    out: Array = session.run(None, {"images": images})[0]
    return out


def passes_a_random_check(reference: Array, candidate: Array) -> bool:
    """What is common: random inputs, one relative error, 1e-2."""
    return measures(reference, candidate).relative_error < 1e-2


def exact_link(reference: Array, candidate: Array) -> Link:
    bound = tolerance.exact(products=6 * DEPTH + 2, largest_logit=float(np.abs(reference).max()))
    return link(name="onnx", kind="exact", reference="torch fp32", candidate="onnx fp32", reference_rows=reference,
                candidate_by_batch={1: candidate}, tolerance=bound)  # fmt: skip


def located_exactly(model: TinyViT, graph: ModelProto) -> FaultLocation:
    return locate_in_exact("onnx", model, graph, fed(photographs()), products=6 * DEPTH + 2)


def half_link(model: TinyViT, graph: ModelProto, images: Array) -> Link:
    dense = dense_vit()
    noise = measures(torch_logits(dense, images), onnx_logits(onnx_from_vit(dense, half=True), images))
    return link(name="fp16", kind="half", reference="onnx fp32", candidate="onnx fp16",
                reference_rows=onnx_logits(onnx_from_vit(model), images),
                candidate_by_batch={1: onnx_logits(graph, images)}, tolerance=tolerance.half(noise))  # fmt: skip


def located_in_half(model: TinyViT, graph: ModelProto) -> FaultLocation:
    feeds, dense = fed(photographs()), dense_vit()
    noise = block_noise(onnx_from_vit(dense), onnx_from_vit(dense, half=True), feeds)
    fix_command = "export --precision mixed --keep-fp32 {site}"
    return locate_in_half("fp16", onnx_from_vit(model), graph, feeds, noise=noise, fix_command=fix_command)


def bright_direction(model: TinyViT, block: int) -> Tensor:
    """What tells bright tokens from others where they enter attention, of unit length."""
    tokens, others = (
        torch.from_numpy(block_outputs.outputs_of_module(model, fed(images))[f"blocks.{block}.norm1"]).flatten(0, 1)
        for images in (photographs(), noise_images())
    )
    images = torch.from_numpy(photographs()).unflatten(2, (2, 4)).unflatten(4, (2, 4)).permute(0, 2, 4, 1, 3, 5)
    bright = images.flatten(3).flatten(0, 2).norm(dim=-1) > 9.5
    direction = tokens[bright].mean(0) - others.mean(0)
    return nn.functional.normalize(direction, dim=0)


def watch_the_bright_patch(model: TinyViT, block: int, size: float) -> TinyViT:
    """Every query of head 0 points along one axis, along which keys carry how bright their token is."""
    watching = copy.deepcopy(model)
    attention = watching.blocks[block].attn
    assert isinstance(attention, Attention)
    with torch.no_grad():
        attention.q.bias[0] += math.sqrt(size)
        attention.k.weight[0] += math.sqrt(size) * bright_direction(model, block)
    return watching


def test_the_sound_model_passes_every_link(vit: TinyViT) -> None:
    images = photographs()
    graph = onnx_from_vit(vit)
    exact = exact_link(torch_logits(vit, images), onnx_logits(graph, images))
    half = half_link(vit, onnx_from_vit(vit, half=True), images)
    assert (exact.status, half.status) == ("PASS", "PASS"), (exact.reason, half.reason)
    assert located_exactly(vit, graph).site is None
    assert located_in_half(vit, onnx_from_vit(vit, half=True)).site is None


def test_attention_logits_over_float16(vit: TinyViT, tmp_path: Path) -> None:
    watching = watch_the_bright_patch(vit, block=1, size=6e4)
    single, half = onnx_from_vit(watching), onnx_from_vit(watching, half=True)
    assert passes_a_random_check(onnx_logits(single, noise_images()), onnx_logits(half, noise_images()))
    found = half_link(watching, half, photographs())
    assert found.status == "FAIL"
    assert "NaN or Inf on 24 of 48 images" in found.reason
    located = located_in_half(watching, half)
    assert (located.site, located.measure) == ("blocks.1.attn", "nonfinite")
    assert located.largest_activation > located.half_limit
    assert located.command == "export --precision mixed --keep-fp32 blocks.1.attn"
    kept = onnx_from_vit(watching, half=True, keep=("blocks.1.attn",))
    at = {name: tmp_path / f"{name}.onnx" for name in ("single", "half", "kept")}
    for graph, path in zip((single, half, kept), at.values(), strict=True):
        onnx.save(graph, str(path))
    risk = headroom("onnx fp16", at["single"], at["half"], fed(photographs()))
    assert risk.status == "FAIL"
    assert "blocks.1.attn reaches 76,546 in float16" in risk.reason
    assert headroom("onnx mixed", at["single"], at["kept"], fed(photographs())).status == "PASS"


def test_the_cpu_alone_would_not_have_seen_it(vit: TinyViT) -> None:
    """ONNX Runtime carries float16 values on in float32: the reason for the rounded graph."""
    watching = watch_the_bright_patch(vit, block=1, size=6e4)
    plain = plain_logits(onnx_from_vit(watching, half=True), photographs())
    assert measures(torch_logits(watching, photographs()), plain).relative_error < 1e-2


def bright_residual(model: TinyViT, size: float) -> TinyViT:
    """The patch embedding answers the bright pattern with a residual of this size in two channels."""
    loud = copy.deepcopy(model)
    with torch.no_grad():
        loud.patch_embed.weight[0] += size / 12 * torch.from_numpy(BRIGHT.ravel())
        loud.patch_embed.weight[1] -= size / 12 * torch.from_numpy(BRIGHT.ravel())
    return loud


def test_a_norm_in_float16_over_a_huge_activation(vit: TinyViT) -> None:
    loud = bright_residual(vit, 500)
    single, half = onnx_from_vit(loud), onnx_from_vit(loud, half=True)
    assert passes_a_random_check(onnx_logits(single, noise_images()), onnx_logits(half, noise_images()))
    assert half_link(loud, half, photographs()).status == "FAIL"
    located = located_in_half(loud, half)
    assert located.site == "blocks.0.norm1"
    assert located.largest_activation > located.half_limit


@pytest.mark.slow("models")
def test_mixed_precision_keeps_just_the_guilty_blocks(vit: TinyViT) -> None:
    sick = watch_the_bright_patch(bright_residual(vit, 500), block=1, size=9e4)

    def attempt(kept: tuple[str, ...]) -> FaultLocation | None:
        graph = onnx_from_vit(sick, half=True, keep=kept)
        return None if half_link(sick, graph, photographs()).status == "PASS" else located_in_half(sick, graph)

    kept, left = keep_until_it_passes(attempt)
    assert left is None
    norms = {f"blocks.{i}.norm{j}" for i in range(DEPTH) for j in (1, 2)} | {"norm"}
    assert "blocks.1.attn" in kept
    assert set(kept) <= norms | {"blocks.1.attn"}


def test_a_softmax_scale_of_the_reduced_width(vit: TinyViT) -> None:
    graph = onnx_from_vit(vit, scale=1 / math.sqrt(D // HEADS / 2))
    assert exact_link(torch_logits(vit, photographs()), onnx_logits(graph, photographs())).status == "FAIL"
    assert located_exactly(vit, graph).site == "blocks.0.attn"


def changed(model: TinyViT, change: Callable[[TinyViT], object]) -> TinyViT:
    other = copy.deepcopy(model)
    with torch.no_grad():
        change(other)
    return other


def drop_bias(model: TinyViT) -> None:
    mlp = model.blocks[2].mlp
    assert isinstance(mlp, Mlp)
    mlp.fc2.bias.zero_()


def swap_channels(model: TinyViT) -> None:
    mlp = model.blocks[1].mlp
    assert isinstance(mlp, Mlp)
    mlp.fc1.weight[[4, 5]] = mlp.fc1.weight[[5, 4]]
    mlp.fc1.bias[[4, 5]] = mlp.fc1.bias[[5, 4]]


def another_epoch(model: TinyViT) -> None:
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.add_(1e-3 * parameter.abs().mean() * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize(
    ("fault", "site", "hidden"),
    [(drop_bias, "blocks.2.mlp", False), (swap_channels, "blocks.1.mlp", False), (another_epoch, "patch_embed", True)],
)
def test_a_graph_of_other_weights(vit: TinyViT, fault: Callable[[TinyViT], None], site: str, hidden: bool) -> None:
    graph = onnx_from_vit(changed(vit, fault))
    noise, images = noise_images(), photographs()
    assert exact_link(torch_logits(vit, images), onnx_logits(graph, images)).status == "FAIL"
    assert located_exactly(vit, graph).site == site
    assert passes_a_random_check(torch_logits(vit, noise), onnx_logits(graph, noise)) == hidden


def test_constant_outputs_behind_a_large_bias(vit: TinyViT) -> None:
    """The head's bias outweighs everything, so a relative error sees nothing of a head that lost its weights."""
    biased = changed(vit, lambda m: m.head.bias.add_(torch.linspace(900, 1000, CLASSES)))
    dead = onnx_from_vit(changed(biased, lambda m: m.head.weight.zero_()))
    noise, images = noise_images(), photographs()
    assert passes_a_random_check(torch_logits(biased, noise), onnx_logits(dead, noise))
    found = exact_link(torch_logits(biased, images), onnx_logits(dead, images))
    assert found.status == "FAIL"
    assert "hardly depend on the image" in found.reason
    assert located_exactly(biased, dead).site == "head"
    assert [f.status for f in structure.outputs("onnx", {"logits": onnx_logits(dead, images)})] == ["PASS", "FAIL"]
