"""The table of rules, op by op, against brute force: a channel is changed, and whatever changes has its label."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from corp_deploy.traced import mixing, moves, pointwise
from corp_deploy.traced.holding import stuck
from corp_deploy.traced.marks import Marks
from corp_deploy.traced.program import Program, operation, trace
from corp_deploy.traced.rules import RULES
from corp_deploy.traced.walk import walked

aten = torch.ops.aten
CHANNELS = 12
EACH = torch.linspace(0.1, 0.9, CHANNELS)
Op = Callable[[Tensor], Any]
# Products of activations and layers are read and written: tests of whole models narrow them.
CONTRACTIONS = {
    *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention", "embedding"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
}
# Of a map [B, 12, 4, 4] of channels; a second dimension where an op needs one.
MOVES: dict[str, Op] = {
    "view": lambda x: x.view(-1, 3, 4, 4, 4),
    "reshape": lambda x: x.permute(0, 2, 3, 1).reshape(-1, 16, 3, 4),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(1, (2, 6)),
    "squeeze": lambda x: x[:, :, :1].squeeze(2),
    "unsqueeze": lambda x: x.unsqueeze(2),
    "permute": lambda x: x.permute(2, 0, 3, 1),
    "transpose": lambda x: x.transpose(1, 2),
    "movedim": lambda x: x.movedim(1, -1),
    "slice": lambda x: x[:, 2:9],
    "select": lambda x: x.reshape(-1, 3, 4, 16)[:, 1],
    "narrow": lambda x: x.narrow(1, 4, 5),
    "split": lambda x: x.split(5, 1)[1],
    "split_with_sizes": lambda x: x.split([3, 4, 5], 1)[2],
    "chunk": lambda x: x.chunk(3, 1)[1],
    "unbind": lambda x: x.reshape(-1, 3, 4, 16).unbind(1)[2],
    "cat": lambda x: torch.cat((x[:, 6:], -x[:, :6]), 1),
    "stack": lambda x: torch.stack((x[:, ::2], x[:, 1::2]), -1),
    "roll": lambda x: x.roll((1, 2), (2, 1)),
    "flip": lambda x: x.flip(1),
    "expand": lambda x: x[:, :, :1].expand(-1, -1, 4, -1),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 3),
    "unfold": lambda x: x.unfold(1, 4, 4),
    "pad": lambda x: F.pad(x, (1, 1, 0, 1)),
    "constant_pad_nd": lambda x: aten.constant_pad_nd(x, (0, 0, 1, 1)),
    "index": lambda x: x[:, :, [3, 1]],
    "index_select": lambda x: x.index_select(2, torch.tensor([3, 0, 2])),
    "gather": lambda x: x.gather(2, torch.zeros(x.shape[0], 12, 2, 4, dtype=torch.long)),
    "slice_scatter": lambda x: x.slice_scatter(x[:, :, :2] * 2, 2, 1, 3),
    "select_scatter": lambda x: x.select_scatter(x[:, :, 0] * 2, 2, 1),
    "im2col": lambda x: F.unfold(x, 3, padding=1),
    "col2im": lambda x: F.fold(F.unfold(x, 3, padding=1), (4, 4), 3, padding=1),
    "diagonal": lambda x: x.diagonal(0, 2, 3),
    "contiguous": lambda x: x.transpose(1, 2).contiguous(),
    "clone": lambda x: x.clone(),
    "to": lambda x: x.to(torch.float64),
    "dropout": lambda x: F.dropout(x, 0.5, False),
}
UNARY: dict[str, Op] = {
    name: functools.partial(lambda x, op: op(x), op=getattr(torch, name, None) or getattr(F, name))
    for name in sorted(
        pointwise.UNARY - {"clamp", "clamp_max", "clamp_min", "log_sigmoid", "threshold", "bitwise_not", "full_like"}
    )
    if getattr(torch, name, getattr(F, name, None)) is not None
} | {
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp_min": lambda x: x.clamp_min(0.0),
    "clamp_max": lambda x: x.clamp_max(0.1),
}
BINARY: dict[str, Op] = {
    "add": lambda x: x + x.flip(1),
    "sub": lambda x: x - x.mean((2, 3), keepdim=True),
    "mul": lambda x: x * x.sigmoid().amax((2, 3), keepdim=True),
    "div": lambda x: x / (1 + x[:, :, :1].abs()),
    "rsub": lambda x: 1 - x,
    "pow": lambda x: x**2,
    "maximum": lambda x: torch.maximum(x, x.roll(6, 1)),
    "where": lambda x: torch.where(x > 0, x, x.flip(1)),
    "masked_fill": lambda x: x.masked_fill(x < 0, 1.0),
    "lerp": lambda x: torch.lerp(x, x.flip(1), 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x.flip(1)),
    "copy": lambda x: aten.copy(torch.zeros_like(x), x * 2),
    "prelu": lambda x: F.prelu(x, EACH),
    "batch_norm": lambda x: F.batch_norm(x, EACH, EACH, EACH, EACH),
}
MIXING: dict[str, Op] = {
    "softmax": lambda x: x.softmax(1),
    "softmax along another axis": lambda x: x.reshape(-1, 3, 4, 16).softmax(2),
    "softmax of places": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(1),
    "layer_norm": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (12,)),
    "layer_norm of heads": lambda x: F.layer_norm(x.permute(0, 2, 3, 1).reshape(-1, 16, 3, 4), (4,)),
    "rms_norm": lambda x: F.rms_norm(x.permute(0, 2, 3, 1).reshape(-1, 16, 3, 4), (4,)),
    "native_layer_norm": lambda x: aten.native_layer_norm(x, (4,), None, None, 1e-5)[0],
    "_native_batch_norm_legit_no_training": lambda x: aten._native_batch_norm_legit_no_training(
        x, EACH, EACH, EACH, EACH, 0.1, 1e-5
    )[0],
    "group_norm": lambda x: F.group_norm(x, 3),
    "group_norm of one": lambda x: F.group_norm(x, 1),
    "group_norm of each": lambda x: F.group_norm(x, 12, EACH),
    "instance_norm": lambda x: F.instance_norm(x),
    "normalize": lambda x: F.normalize(x.reshape(-1, 3, 4, 16), dim=2),
    "cumsum": lambda x: x.cumsum(1),
    "cumsum of places": lambda x: x.cumsum(2),
    "sum": lambda x: x.reshape(-1, 3, 4, 16).sum(1),
    "mean": lambda x: x.mean((2, 3)),
    "mean of all": lambda x: x.mean(1),
    "amax": lambda x: x.reshape(-1, 3, 4, 16).amax(2),
    "max": lambda x: x.max(2)[0],
    "topk": lambda x: x.topk(2, 1)[0],
    "topk of places": lambda x: x.topk(2, 2)[0],
    "sort": lambda x: x.reshape(-1, 3, 4, 16).sort(1)[0],
    "argmax": lambda x: x.argmax(1),
    "var": lambda x: x.var(1, keepdim=True),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=(2, 3), keepdim=True),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 2),
    "pool of channels": lambda x: F.avg_pool2d(x.transpose(1, 3), 3, 1, 1),
    "upsample_bilinear2d": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "upsample_nearest2d": lambda x: F.interpolate(x, scale_factor=2),
    "new_zeros": lambda x: x + x.new_zeros(1, 12, 1, 1).expand(x.shape[0], -1, -1, -1),
    "index of channels": lambda x: x[:, [3, 1, 5]],
    "pad of channels": lambda x: F.pad(x, (0, 0, 0, 0, 2, 2)),
    "unknown": lambda x: torch.fft.fft(x, dim=1).real,
}


class Through(nn.Module):
    """Channels that a convolution writes, through an op."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.layer, self.op = nn.Conv2d(3, CHANNELS, 1), op

    def forward(self, x: Tensor) -> Any:
        return self.op(self.layer(x))


def outputs(program: Program, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [each for each in [program.graph(x)] if isinstance(each, Tensor)]


def labels_behind(program: Program) -> tuple[Tensor, Tensor, Tensor]:
    """The groups of the channels, of the output's elements, and which must stay, before the model gives them."""
    (end,) = [node for node in program.nodes if node.op == "output"]
    (last,) = end.all_input_nodes
    program.graph.graph.erase_node(end)
    flow = walked(program)
    value = flow.values[last]
    assert isinstance(value, Marks)
    rows = next(touch.labels for touch in flow.touches if touch.constant == "layer.weight")
    labels = torch.full(value.shape, -1) if value.labels is None else flow.groups.of(value.labels)
    return flow.groups.of(rows).long(), labels, stuck(flow)


def held(op: Op) -> int:
    """How many channels can go, each of those checked."""
    torch.manual_seed(0)
    program = trace(Through(op), (torch.randn(2, 3, 4, 4),))
    rows, labels, stays = labels_behind(program)
    x = torch.randn(1, 3, 4, 4)
    (before,) = outputs(program, x)
    assert before.shape == labels.shape
    free = [channel for channel in range(CHANNELS) if not stays[rows[channel]]]
    for channel in free:
        bias = program.tensor("layer.bias").data
        kept = bias.clone()
        bias[channel] += 0.7
        (after,) = outputs(program, x)
        bias.copy_(kept)
        changed = ~torch.isclose(before, after, equal_nan=True)
        assert bool((labels[changed] == rows[channel]).all()), channel
    return len(free)


@pytest.mark.parametrize("name", MOVES)
def test_moves_take_every_label_along(name: str) -> None:
    assert held(MOVES[name]) == CHANNELS


@pytest.mark.parametrize("name", UNARY)
def test_what_works_element_by_element_keeps_labels(name: str) -> None:
    assert held(UNARY[name]) == CHANNELS


@pytest.mark.parametrize("name", BINARY)
def test_labels_that_meet_are_one(name: str) -> None:
    assert held(BINARY[name]) == CHANNELS


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_makes_one_lump(name: str) -> None:
    held(MIXING[name])


@pytest.mark.parametrize("name", ["softmax", "group_norm of one", "cumsum", "topk", "mean of all", "argmax", "unknown"])
def test_one_lump_of_all_stays(name: str) -> None:
    assert held(MIXING[name]) == 0


def test_every_rule_is_held_to_something() -> None:
    """By one of the ops that share it, at least."""
    named = {name.partition(" ")[0] for name in (*MOVES, *UNARY, *BINARY, *MIXING)} | CONTRACTIONS
    unheld = {rule for op, rule in RULES.items()} - {RULES[name] for name in named if name in RULES}
    assert unheld <= {moves.picked}
    assert set(UNARY) >= pointwise.UNARY - {"log_sigmoid", "threshold", "full_like"} - _unnamed()
    assert set(RULES) >= mixing.OVER_DIM


def _unnamed() -> set[str]:
    """Spelled otherwise in Python than in ATen, or of Booleans alone."""
    return {name for name in pointwise.UNARY if getattr(torch, name, getattr(F, name, None)) is None} | {"bitwise_not"}


def test_an_op_goes_by_its_name_in_aten() -> None:
    program = trace(Through(lambda x: x.relu().softmax(1)), (torch.randn(2, 3, 4, 4),))
    names = [operation(node) for node in program.nodes if isinstance(node, fx.Node)]
    assert names[-3:] == ["relu", "softmax", "output"]
