"""The table of rules, op by op, against brute force on random shapes: elements of one label are changed, and whatever
changes has that label, or goes with it, or the label stays.
"""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from corp_deploy.traced.choice import stuck
from corp_deploy.traced.flow import Flow
from corp_deploy.traced.labels import Marks, marked
from corp_deploy.traced.pointwise import is_pointwise
from corp_deploy.traced.program import Program, operation
from corp_deploy.traced.rules import RULES
from corp_deploy.traced.walk import value_of

aten: Any = torch.ops.aten
TIMES, CHANGES = 2, 5
Case = Callable[[random.Random, Tensor], tuple[Any, ...]]


def _alone(op: Any) -> Case:
    return lambda _, x: (op, x)


def _spread(op: Any) -> Case:
    """With a tensor that is spread out."""
    return lambda r, x: (op, x, torch.rand([r.choice([1, size]) for size in x.shape[r.randint(0, 2) :]]))


# Of a map [1, C, H, W]: an overload and its arguments. Tensors have labels along random axes, parameters have none.
MOVES: dict[str, Case] = {
    "view": lambda r, x: (aten.view.default, x, [1, 2, -1, x.shape[3]]),
    "reshape": lambda r, x: (aten.reshape.default, x, [-1, x.shape[2] // 2, 2, x.shape[3]]),
    "flatten": lambda r, x: (aten.flatten.using_ints, x, r.randint(0, 2), 3),
    "unflatten": lambda r, x: (aten.unflatten.int, x, (dim := r.randint(1, 3)), [2, x.shape[dim] // 2]),
    "squeeze": lambda r, x: (aten.squeeze.dim, x, 0),
    "unsqueeze": lambda r, x: (aten.unsqueeze.default, x, r.randint(-5, 4)),
    "permute": lambda r, x: (aten.permute.default, x, r.sample(range(4), 4)),
    "transpose": lambda r, x: (aten.transpose.int, x, *r.sample(range(4), 2)),
    "movedim": lambda r, x: (aten.movedim.int, x, r.randint(0, 3), r.randint(0, 3)),
    "slice": lambda r, x: (aten.slice.Tensor, x, r.randint(1, 3), r.randint(0, 1), r.randint(2, 4), r.randint(1, 2)),
    "select": lambda r, x: (aten.select.int, x, r.randint(1, 3), r.randint(-2, 3)),
    "narrow": lambda r, x: (aten.narrow.default, x, r.randint(1, 3), 1, r.randint(1, 3)),
    "split": lambda r, x: (aten.split.Tensor, x, r.randint(1, 4), r.randint(1, 3)),
    "split_with_sizes": lambda r, x: (aten.split_with_sizes.default, x, [1, x.shape[2] - 1], 2),
    "chunk": lambda r, x: (aten.chunk.default, x, r.randint(2, 3), r.randint(1, 3)),
    "unbind": lambda r, x: (aten.unbind.int, x, r.randint(0, 3)),
    "roll": lambda r, x: (aten.roll.default, x, [1, -2], [2, r.randint(0, 1)]),
    "flip": lambda r, x: (aten.flip.default, x, r.sample(range(4), 2)),
    "expand": lambda r, x: (aten.expand.default, x, [r.randint(1, 3), -1, -1, -1]),
    "repeat": lambda r, x: (aten.repeat.default, x, [1, *r.sample([1, 2, 3], 3)]),
    "repeat_interleave": lambda r, x: (aten.repeat_interleave.self_int, x, 2, r.randint(0, 3)),
    "pixel_shuffle": lambda r, x: (aten.pixel_shuffle.default, x, 2),
    "pixel_unshuffle": lambda r, x: (aten.pixel_unshuffle.default, x, 2),
    "channel_shuffle": lambda r, x: (aten.channel_shuffle.default, x, r.choice([2, 4])),
    "unfold": lambda r, x: (aten.unfold.default, x, r.randint(1, 3), r.randint(1, 4), r.randint(1, 2)),
    "diagonal": lambda r, x: (aten.diagonal.default, x, r.randint(-1, 1), *r.sample([1, 2, 3], 2)),
    "contiguous": lambda r, x: (aten.contiguous.default, x),
    "to": lambda r, x: (aten.to.dtype, x, torch.float64),
    "dropout": lambda r, x: (aten.dropout.default, x, 0.5, False),
    "copy": lambda r, x: (aten.copy.default, _constant(torch.zeros_like(x)), x),
    "neg": lambda r, x: (aten.neg.default, x),
    "clamp": lambda r, x: (aten.clamp.default, x, -0.5, 0.5),
}
TWO: dict[str, Case] = {
    "cat": lambda r, x: (aten.cat.default, [x, torch.randn_like(x)], r.randint(1, 3)),
    "stack": lambda r, x: (aten.stack.default, [x, torch.randn_like(x)], r.randint(0, 4)),
    "select_scatter": lambda r, x: (aten.select_scatter.default, x, torch.randn_like(x[:, :, 0]), 2, 1),
    "slice_scatter": lambda r, x: (aten.slice_scatter.default, x, torch.randn_like(x[:, :, :2]), 2, 1, 3),
    "pad": lambda r, x: (aten.pad.default, x, [1, 0, r.randint(0, 2), 0, 0, r.randint(0, 1)]),
    "constant_pad_nd": lambda r, x: (aten.constant_pad_nd.default, x, [r.randint(-1, 2), 0, 0, 1]),
    "index": lambda r, x: (aten.index.Tensor, x, [None, None, torch.tensor([1, 0, 1])]),
    "index_select": lambda r, x: (aten.index_select.default, x, r.randint(1, 3), torch.tensor([1, 0])),
    "gather": lambda r, x: (aten.gather.default, x, 2, torch.randint(2, (1, x.shape[1], 2, x.shape[3]))),
    **{
        name: _spread(op)
        for name, op in (("add", aten.add.Tensor), ("mul", aten.mul.Tensor), ("max of two", aten.maximum.default))
    },
    "where": lambda r, x: (aten.where.self, _constant(torch.randn_like(x)) > 0, x, torch.randn_like(x[:, :1])),
    "lerp": lambda r, x: (aten.lerp.Scalar, x, torch.randn_like(x), 0.3),
    "max": lambda r, x: (aten.max.other, x, torch.randn_like(x)),
    "prelu": lambda r, x: (aten.prelu.default, x, _each(x)),
    "batch_norm": lambda r, x: (aten.batch_norm.default, x, *[_each(x)] * 4, False, 0.1, 1e-5, False),
    "matmul": lambda r, x: (aten.matmul.default, x, torch.randn(x.shape[3], 3)),
    "bmm": lambda r, x: (aten.bmm.default, x[0], torch.randn_like(x[0]).mT),
    "linear": lambda r, x: (aten.linear.default, x, _constant(torch.randn(5, x.shape[3]))),
    "conv2d": lambda r, x: (aten.conv2d.default, x, _kernel(x), None, [1, 1], [1, 1], [1, 1], x.shape[1]),
}
ALONG = "softmax.int log_softmax.int cumsum.default cumprod.default logcumsumexp.default sort.default argsort.default"
REDUCE = """amax.default amin.default argmax.default argmin.default median.dim mode.default prod.dim_int
logsumexp.default mean.dim sum.dim_IntList var.dim std.dim max.dim min.dim norm.ScalarOpt_dim
linalg_vector_norm.default nanmean.default count_nonzero.dim_IntList"""
MIXING: dict[str, Case] = {
    "_softmax": lambda r, x: (aten._softmax.default, x, r.randint(0, 3), False),
    "topk": lambda r, x: (aten.topk.default, x, 2, r.randint(1, 3)),
    "kthvalue": lambda r, x: (aten.kthvalue.default, x, 2, r.randint(1, 3)),
    "mean of all": lambda r, x: (aten.mean.default, x),
    "layer_norm": lambda r, x: (aten.layer_norm.default, x, list(x.shape[r.randint(1, 3) :])),
    "rms_norm": lambda r, x: (aten.rms_norm.default, x, list(x.shape[r.randint(2, 3) :])),
    "native_layer_norm": lambda r, x: (aten.native_layer_norm.default, x, list(x.shape[3:]), None, None, 1e-5),
    "_native_batch_norm_legit_no_training": lambda r, x: (
        aten._native_batch_norm_legit_no_training.default,
        *(x, *[_each(x)] * 4, 0.1, 1e-5),
    ),
    "group_norm": lambda r, x: (aten.group_norm.default, x, r.choice([1, 2, 4, x.shape[1]]), _each(x)),
    "instance_norm": lambda r, x: (aten.instance_norm.default, x, *[None] * 4, True, 0.1, 1e-5, False),
    "im2col": lambda r, x: (aten.im2col.default, x, [3, 2], [1, 1], [1, 0], [1, r.randint(1, 2)]),
    "col2im": lambda r, x: (
        aten.col2im.default,
        torch.randn(1, 4 * x.shape[1], 9),
        [4, 4],
        *[[2, 2], [1, 1], [0, 0]],
        [1, 1],
    ),
    "avg_pool2d": lambda r, x: (aten.avg_pool2d.default, x, [r.randint(1, 3), 2], [1, 2]),
    "max_pool2d": lambda r, x: (aten.max_pool2d.default, x, [2, r.randint(1, 3)], [2, 1]),
    "max_pool2d_with_indices": lambda r, x: (aten.max_pool2d_with_indices.default, x, [2, 2]),
    "adaptive_avg_pool2d": lambda r, x: (aten.adaptive_avg_pool2d.default, x, [r.randint(1, 3), 2]),
    "adaptive_max_pool1d": lambda r, x: (aten.adaptive_max_pool1d.default, x[0], [2]),
    "upsample_bilinear2d": lambda r, x: (aten.upsample_bilinear2d.default, x, [5, r.randint(3, 9)], False),
    "upsample_nearest2d": lambda r, x: (aten.upsample_nearest2d.default, x, [5, r.randint(3, 9)]),
    "grid_sampler": lambda r, x: (aten.grid_sampler.default, x, _constant(torch.rand(1, 3, 3, 2)), 0, 0, False),
    "new_zeros": lambda r, x: (aten.new_zeros.default, x, [2, 3]),
    "unknown": lambda r, x: (aten.cdist.default, x, x),
}


def _constant(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _each(x: Tensor) -> nn.Parameter:
    """A positive number for each channel."""
    return _constant(torch.rand(x.shape[1]) + 0.5)


def _kernel(x: Tensor) -> nn.Parameter:
    return _constant(torch.randn(x.shape[1] * 2, 1, 3, 3))


def program_of(case: tuple[Any, ...]) -> tuple[Program, list[Tensor]]:
    """One call, and the tensors that enter it; parameters are constants."""
    graph, constants, entering = fx.Graph(), dict[str, Tensor](), list[Tensor]()

    def node_of(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        is_constant, name = isinstance(tensor, nn.Parameter), f"tensor_{len(constants) + len(entering)}"
        node = graph.get_attr(name) if is_constant else graph.placeholder(name)
        node.meta["val"] = tensor
        constants.update({name: tensor} if is_constant else {})
        entering.extend([] if is_constant else [tensor])
        return node

    target, *args = case
    node = graph.call_function(target, tuple(tree_map(node_of, args)))
    node.meta["val"] = target(*args)
    graph.output(node)
    return Program(graph=fx.GraphModule(constants, graph), model="", any_batch=False, folded=()), entering


def labelled(flow: Flow, draw: random.Random, tensor: Tensor) -> Marks:
    """New labels along one axis or several; none of what counts or says where."""
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    axes = draw.sample(dims, draw.randint(min(1, len(dims)), len(dims)))
    if not axes or not tensor.is_floating_point():
        return Marks(tuple(tensor.shape))
    labels = flow.fresh([size if dim in axes else 1 for dim, size in enumerate(tensor.shape)])
    return marked(labels.expand(tensor.shape))


def changes(case: tuple[Any, ...], draw: random.Random) -> tuple[int, int]:
    """How many labels there are and how many are free, some of each changed and what becomes of it looked at."""
    program, entering = program_of(case)
    flow = Flow(program=program)
    *before, node, _ = program.nodes
    for each in before:
        is_input = each.op == "placeholder"
        flow.values[each] = labelled(flow, draw, each.meta["val"]) if is_input else value_of(flow, each)
    count = flow.groups.count
    given = [each for each in tree_leaves(value_of(flow, node)) if isinstance(each, Marks)]
    stays, summed = stuck(flow), [flow.groups.of(use.labels) for use in flow.every_use if not use.is_of_constant]
    free = [label for label in range(count) if not stays[flow.groups.of(torch.tensor(label))]]
    with torch.no_grad():
        dense = [each for each in tree_leaves(program.graph(*entering)) if isinstance(each, Tensor)]
        for label in draw.sample(free, min(CHANGES, len(free))):
            group = flow.groups.of(torch.tensor(label))
            goes = {int(group), *(int(i) for outer, inner in flow.held() for i in inner[outer == group])}
            if any(bool((labels == group).any()) for labels in summed):
                continue
            other = [_changed(flow, each, group) for each in before if each.op == "placeholder"]
            for was, now, marks in zip(dense, tree_leaves(program.graph(*other)), given, strict=True):
                at = ~torch.isclose(was, now, equal_nan=True)
                found = torch.full(was.shape, -1) if marks.labels is None else flow.groups.of(marks.labels)
                assert marks.shape == tuple(was.shape)
                assert set(found[at].tolist()) <= goes, (case[0], case[2:], label)
    return count, len(free)


def _changed(flow: Flow, node: fx.Node, group: Tensor) -> Tensor:
    """A tensor that enters, its elements of a group others."""
    tensor, labels = node.meta["val"], flow.values[node].labels
    at = torch.zeros(tensor.shape, dtype=torch.bool) if labels is None else flow.groups.of(labels) == group
    return torch.where(at, tensor + 0.3 + torch.rand(tensor.shape), tensor) if tensor.is_floating_point() else tensor


def held(name: str, case: Case) -> list[tuple[int, int]]:
    """On shapes drawn by the name of the op."""
    draw = random.Random(name)
    torch.manual_seed(len(name))
    counts = list[tuple[int, int]]()
    for _ in range(TIMES):
        x = torch.randn(1, draw.choice([4, 8, 12]), draw.choice([4, 6]), draw.choice([4, 6, 8]))
        counts.append(changes(case(draw, x), draw))
    return counts


def overload(name: str) -> Any:
    op, _, of = name.partition(".")
    return getattr(getattr(aten, op), of)


def by_dim(name: str) -> Case:
    """An op along an axis, others as they are by default."""

    def case(draw: random.Random, x: Tensor) -> tuple[Any, ...]:
        dims = [each for each in overload(name)._schema.arguments if each.name == "dim"]
        dim = draw.randint(1, 3)
        args = {"linalg_vector_norm": [2], "norm": [2]}.get(name.partition(".")[0], [])
        return overload(name), x, *args, [dim] if "List" in str(dims[0].type) else dim

    return case


def unary() -> list[Any]:
    """All ops of one tensor alone that work element by element."""
    names = {name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    ops = [getattr(getattr(aten, name, None), "default", None) for name in sorted(names) if name[-1] != "_"]
    return [op for op in ops if isinstance(op, torch._ops.OpOverload) and _is_unary(op)]


def _is_unary(op: Any) -> bool:
    needed = [each for each in op._schema.arguments if not each.has_default_value()]
    is_one = len(needed) == len(op._schema.returns) == 1 and op.namespace == "aten"
    return is_one and is_pointwise(op) and operation_of(op) not in {*RULES, "clamp", "clip"}


def operation_of(op: Any) -> str:
    return str(op._schema.name.removeprefix("aten::"))


@pytest.mark.parametrize("name", MOVES)
def test_moves_take_every_label_along(name: str) -> None:
    assert all(count == free for count, free in held(name, MOVES[name]))


def test_what_works_element_by_element_keeps_labels() -> None:
    for op in unary():
        if "bitwise" not in str(op):
            assert all(count == free for count, free in held(str(op), _alone(op))), op
    assert len(unary()) > 70


@pytest.mark.parametrize("name", [*TWO, *MIXING, *ALONG.split(), *REDUCE.split()])
def test_labels_that_meet_or_are_mixed_go_together(name: str) -> None:
    held(name, (TWO | MIXING)[name] if name in TWO | MIXING else by_dim(name))


@pytest.mark.parametrize("op", [aten.softmax.int, aten.cumsum.default, aten.amax.default])
def test_one_lump_of_all_stays(op: Any) -> None:
    program, _ = program_of((op, torch.randn(1, 6), 1 if op is not aten.amax.default else [1]))
    flow = Flow(program=program)
    source, node, _ = program.nodes
    flow.values[source] = marked(flow.fresh((1, 6)))
    assert value_of(flow, node).labels is None
    assert bool(stuck(flow).all())
    assert operation(node) in next(iter(flow.groups.reasons[1:]))


# Each has the rule of an op that is held here.
SHARED = """
_adaptive_avg_pool2d _log_softmax _to_copy _unsafe_view _upsample_bicubic2d_aa _upsample_bilinear2d_aa
_upsample_nearest_exact2d adaptive_avg_pool1d adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d addmm alias
all alpha_dropout any avg_pool1d avg_pool3d baddbmm broadcast_to clone concat conv1d conv3d conv_transpose1d
conv_transpose2d conv_transpose3d detach detach_ dropout_ einsum expand_as feature_dropout lift_fresh lift_fresh_copy
mT max_pool1d max_pool3d mm moveaxis new_empty new_full new_ones ravel reshape_as resolve_conj resolve_neg softmin
std_mean swapaxes swapdims t tensor_split tile type_as unsafe_chunk unsafe_split upsample_bicubic2d upsample_linear1d
upsample_nearest1d upsample_nearest3d upsample_nearest_exact2d upsample_trilinear3d var_mean view_as
"""
# Tests of whole models narrow what goes through these.
WHOLE = {"embedding", "getitem", "scaled_dot_product_attention"}


def test_every_rule_is_held_to_something() -> None:
    cases = (*MOVES, *TWO, *MIXING, *ALONG.split(), *REDUCE.split())
    named = {re.split("[ .]", name)[0] for name in cases} & set(RULES)
    assert sorted(set(RULES) - named - WHOLE) == sorted(SHARED.split())
    assert {RULES[op] for op in SHARED.split()} <= {RULES[op] for op in named}


def test_an_op_goes_by_its_name_in_aten() -> None:
    for op, name, *extra in ((aten.relu_.default, "relu_"), (aten.softmax.int, "softmax", 1)):
        (node,) = [each for each in program_of((op, torch.ones(1, 3), *extra))[0].nodes if each.op == "call_function"]
        assert operation(node) == name
