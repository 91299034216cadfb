"""Faults planted in a tiny ViT: the parity links find each one and name its site.

Its images have one bright patch, as photographs have structure; on random inputs several of the faults stay below a
relative error of 1e-2. Legend: B images, T tokens, D width.
"""

import copy
import io
import math
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import ModelProto
from torch import Tensor, nn
from torch.onnx import utils as torchscript

from perf.parity import block_outputs, structure, tolerance
from perf.parity.block_outputs import check_headroom, locate_in_exact, locate_in_half, measure_block_noise
from perf.parity.link import Link
from perf.parity.locate import FaultLocation, keep_until_it_passes
from perf.parity.logits import LogitMeasures, measure_logits
from perf.parity.rounding import rounded_graph
from tests.links import link_between

D, HEADS, DEPTH, HIDDEN, CLASSES, PATCH_INPUTS = 32, 2, 3, 64, 10, 48
SCALE = 1 / math.sqrt(D // HEADS)
Array = NDArray[np.float32]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(D, D) for _ in range(4))
        self.scale = SCALE

    def forward(self, x_BTD: Tensor) -> Tensor:
        parts = self.q(x_BTD) * self.scale, self.k(x_BTD), self.v(x_BTD)
        q, k, v = (part.reshape(-1, 4, HEADS, D // HEADS).transpose(1, 2) for part in parts)
        out: Tensor = self.proj(((q @ k.transpose(2, 3)).softmax(-1) @ v).transpose(1, 2).reshape(-1, 4, D))
        return out


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.fc1(x_BTD).relu())
        return out


class Norm(nn.LayerNorm):
    """A layer norm of single operators, as engines without the fused one run it: the square overflows first."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        centred = x_BTD - x_BTD.mean(-1, keepdim=True)
        return centred / ((centred * centred).mean(-1, keepdim=True) + self.eps).sqrt() * self.weight + self.bias


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = Norm(D), Attention(), Norm(D), Mlp()

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.norm1(x_BTD))
        out: Tensor = x_BTD + self.mlp(self.norm2(x_BTD))
        return out


class TinyViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(PATCH_INPUTS, D)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = Norm(D), nn.Linear(D, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = images.reshape(-1, 3, 2, 4, 2, 4).permute(0, 2, 4, 1, 3, 5)
        x = self.patch_embed(patches.reshape(-1, 4, PATCH_INPUTS))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x).mean(1))
        return out


def cast_around(module: nn.Module, inside: torch.dtype, outside: torch.dtype) -> None:
    within = module.to(inside).forward
    module.forward = lambda x: within(x.to(inside)).to(outside)


def onnx_from_vit(
    model: TinyViT, *, half: bool = False, keep: tuple[str, ...] = (), scale: float = SCALE
) -> ModelProto:
    """Export a graph whose modules outside `keep` are float16 if `half`, with nodes named by modules as in exports."""
    typed, file = copy.deepcopy(model), io.BytesIO()
    for block in typed.blocks:
        block.attn.scale = scale  # type: ignore[union-attr]
    if half:
        cast_around(typed, torch.float16, torch.float32)
    for path in keep:
        cast_around(typed.get_submodule(path), torch.float32, torch.float16)
    batch = {0: "batch"}
    with warnings.catch_warnings():  # the older exporter takes milliseconds, and warns that it is deprecated
        warnings.simplefilter("ignore")
        torchscript.export(  # it also takes an open file
            typed, (torch.zeros(2, 3, 8, 8),), file, opset_version=20, input_names=["images"], output_names=["logits"],  # type: ignore[arg-type]
            dynamic_axes={"images": batch, "logits": batch},
        )  # fmt: skip
    proto = onnx.load_model_from_string(file.getvalue())
    for node in proto.graph.node:
        *path, kind = node.name.strip("/").split("/")
        node.name = f"{'.'.join(path)}/{kind}" if path else kind
    return proto


BRIGHT = np.random.default_rng(99).standard_normal((3, 4, 4)).astype(np.float32)
BRIGHT /= np.linalg.norm(BRIGHT)


def photographs(count: int = 48, seed: int = 1) -> Array:
    """Return images of noise with a bright pattern in one of the four patches."""
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


def torch_logits(model: TinyViT, images: Array) -> Array:
    with torch.inference_mode():
        out: Array = model(torch.from_numpy(images)).numpy()
    return out


def onnx_logits(model: ModelProto, images: Array) -> Array:
    """Return the logits of an engine that keeps to the graph's types, rounding wherever it says float16."""
    return plain_logits(rounded_graph(model), images)


def plain_logits(model: ModelProto, images: Array) -> Array:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    out: Array = session.run(None, {"images": images})[0]
    return out


def passes_a_random_check(reference: Array, candidate: Array) -> bool:
    """Return whether the outputs on random inputs pass the usual check, a relative error below 1e-2."""
    return measure_logits(reference, candidate).relative_error < 1e-2


def exact_link(reference: Array, candidate: Array) -> Link:
    bound = tolerance.exact_tolerance(products=6 * DEPTH + 2, largest_logit=float(np.abs(reference).max()))
    return link_between(reference, candidate, kind="exact", tolerance=bound)


def located_exactly(model: TinyViT, graph: ModelProto) -> FaultLocation:
    return locate_in_exact("onnx", model, graph, {"images": photographs()}, products=6 * DEPTH + 2)


@cache
def noise_of_halves() -> tuple[LogitMeasures, dict[str, float]]:
    """Measure how float16 changes the dense model's logits and block outputs on photographs."""
    dense, images = dense_vit(), photographs()
    single, half = (onnx_from_vit(dense, half=half) for half in (False, True))
    blocks = measure_block_noise(single, half, {"images": images})
    return measure_logits(torch_logits(dense, images), onnx_logits(half, images)), blocks


def half_link(model: TinyViT, graph: ModelProto) -> Link:
    single, half = (onnx_logits(each, photographs()) for each in (onnx_from_vit(model), graph))
    return link_between(single, half, kind="half", tolerance=tolerance.half_tolerance(noise_of_halves()[0]))


def located_in_half(model: TinyViT, graph: ModelProto) -> FaultLocation:
    fix_command, noise = "export --precision mixed --keep-fp32 {site}", noise_of_halves()[1]
    feeds = {"images": photographs()}
    return locate_in_half("fp16", onnx_from_vit(model), graph, feeds, noise=noise, fix_command=fix_command)


def bright_direction(model: TinyViT, block: int) -> Tensor:
    """Return the unit vector from other tokens to bright ones at the input of a block's attention."""
    tokens, others = (
        torch.from_numpy(block_outputs.outputs_of_module(model, {"images": images})[f"blocks.{block}.norm1"]).flatten(
            0, 1
        )
        for images in (photographs(), noise_images())
    )
    images = torch.from_numpy(photographs()).unflatten(2, (2, 4)).unflatten(4, (2, 4)).permute(0, 2, 4, 1, 3, 5)
    bright = images.flatten(3).flatten(0, 2).norm(dim=-1) > 9.5
    direction = tokens[bright].mean(0) - others.mean(0)
    return nn.functional.normalize(direction, dim=0)


def watch_the_bright_patch(model: TinyViT, block: int, size: float) -> TinyViT:
    """Make every query of head 0 ask one channel, in which each key carries the brightness of its token."""
    watching = copy.deepcopy(model)
    attention = watching.blocks[block].attn
    assert isinstance(attention, Attention)
    with torch.no_grad():
        attention.q.bias[0] += math.sqrt(size)
        attention.k.weight[0] += math.sqrt(size) * bright_direction(model, block)
    return watching


def test_correct_model_passes_every_link(vit: TinyViT) -> None:
    images = photographs()
    graph = onnx_from_vit(vit)
    exact = exact_link(torch_logits(vit, images), onnx_logits(graph, images))
    half = half_link(vit, onnx_from_vit(vit, half=True))
    assert (exact.status, half.status) == ("PASS", "PASS"), (exact.reason, half.reason)
    assert located_exactly(vit, graph).site is None
    assert located_in_half(vit, onnx_from_vit(vit, half=True)).site is None


def test_attention_logits_beyond_float16_range_fail(vit: TinyViT, tmp_path: Path) -> None:
    watching = watch_the_bright_patch(vit, block=1, size=6e4)
    single, half = onnx_from_vit(watching), onnx_from_vit(watching, half=True)
    assert passes_a_random_check(onnx_logits(single, noise_images()), onnx_logits(half, noise_images()))
    found = half_link(watching, half)
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
    risk = check_headroom("onnx fp16", at["single"], at["half"], {"images": photographs()})
    assert risk.status == "FAIL"
    assert "blocks.1.attn reaches 76,546 in float16" in risk.reason
    assert check_headroom("onnx mixed", at["single"], at["kept"], {"images": photographs()}).status == "PASS"


def bright_residual(model: TinyViT, size: float) -> TinyViT:
    """Make the patch embedding turn the bright pattern into a residual of this size in two channels."""
    loud = copy.deepcopy(model)
    with torch.no_grad():
        loud.patch_embed.weight[0] += size / 12 * torch.from_numpy(BRIGHT.ravel())
        loud.patch_embed.weight[1] -= size / 12 * torch.from_numpy(BRIGHT.ravel())
    return loud


def test_float16_norm_over_a_huge_activation_fails(vit: TinyViT) -> None:
    loud = bright_residual(vit, 500)
    single, half = onnx_from_vit(loud), onnx_from_vit(loud, half=True)
    assert passes_a_random_check(onnx_logits(single, noise_images()), onnx_logits(half, noise_images()))
    assert half_link(loud, half).status == "FAIL"
    located = located_in_half(loud, half)
    assert located.site == "blocks.0.norm1"
    assert located.largest_activation > located.half_limit


def test_softmax_scale_of_the_reduced_width_fails(vit: TinyViT) -> None:
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
def test_graph_with_other_weights_fails(
    vit: TinyViT, fault: Callable[[TinyViT], None], site: str, hidden: bool
) -> None:
    graph = onnx_from_vit(changed(vit, fault))
    noise, images = noise_images(), photographs()
    assert exact_link(torch_logits(vit, images), onnx_logits(graph, images)).status == "FAIL"
    assert located_exactly(vit, graph).site == site
    assert passes_a_random_check(torch_logits(vit, noise), onnx_logits(graph, noise)) == hidden


def test_constant_outputs_hidden_by_a_large_bias_fail(vit: TinyViT) -> None:
    """The head's bias is so large that the relative error doesn't show that the head lost its weights."""
    biased = changed(vit, lambda m: m.head.bias.add_(torch.linspace(900, 1000, CLASSES)))
    dead = onnx_from_vit(changed(biased, lambda m: m.head.weight.zero_()))
    noise, images = noise_images(), photographs()
    assert passes_a_random_check(torch_logits(biased, noise), onnx_logits(dead, noise))
    found = exact_link(torch_logits(biased, images), onnx_logits(dead, images))
    assert found.status == "FAIL"
    assert "hardly depend on the image" in found.reason
    assert located_exactly(biased, dead).site == "head"
    finite, constant = structure.check_output_values("onnx", {"logits": onnx_logits(dead, images)})
    assert (finite.status, constant.status) == ("PASS", "FAIL")


def test_onnxruntime_on_the_cpu_misses_the_float16_overflow(vit: TinyViT) -> None:
    """ONNX Runtime computes float16 graphs in float32 on the CPU, which is why these tests round the graph."""
    watching = watch_the_bright_patch(vit, block=1, size=6e4)
    plain = plain_logits(onnx_from_vit(watching, half=True), photographs())
    assert measure_logits(torch_logits(watching, photographs()), plain).relative_error < 1e-2


@pytest.mark.slow("models")
def test_mixed_precision_keeps_only_the_faulty_blocks_in_float32(vit: TinyViT) -> None:
    sick = watch_the_bright_patch(bright_residual(vit, 500), block=1, size=9e4)

    def attempt(kept: tuple[str, ...]) -> FaultLocation | None:
        graph = onnx_from_vit(sick, half=True, keep=kept)
        return None if half_link(sick, graph).status == "PASS" else located_in_half(sick, graph)

    kept, left = keep_until_it_passes(attempt)
    assert left is None
    norms = {f"blocks.{i}.norm{j}" for i in range(DEPTH) for j in (1, 2)} | {"norm"}
    assert "blocks.1.attn" in kept
    assert set(kept) <= norms | {"blocks.1.attn"}
