"""The rules of every op against brute force on random shapes.

Changing the elements of a label may only change outputs that have this label or go with it, unless the label stays.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from corp_deploy.traced.finding.flow import Flow, find_stuck
from corp_deploy.traced.finding.labels import LabelTensor, label_tensor
from corp_deploy.traced.finding.pointwise import is_pointwise
from corp_deploy.traced.finding.walk import RULES, evaluate_node
from corp_deploy.traced.programs.program import Program
from corp_deploy.traced.programs.sizes import set_sizes

aten: Any = torch.ops.aten
DRAWS, CHANGES = 2, 5
Case = Callable[[random.Random, Tensor], tuple[Any, ...]]


def constant(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.rand(sizes) + 0.5, requires_grad=False)


def like(overloads: str, case: Case) -> dict[str, Case]:
    return dict.fromkeys(overloads.split(), case)


# Arguments of each op for a map [1, C, H, W]; tensors get labels along random axes, parameters get none.
MOVES: dict[str, Case] = {
    "view.default": lambda r, x: (x, [1, 2, -1, x.shape[3]]),
    "reshape.default": lambda r, x: (x, [-1, x.shape[2] // 2, 2, x.shape[3]]),
    "flatten.using_ints": lambda r, x: (x, r.randint(0, 2), 3),
    "unflatten.int": lambda r, x: (x, (dim := r.randint(1, 3)), [2, x.shape[dim] // 2]),
    "squeeze.dim": lambda r, x: (x, 0), "unsqueeze.default": lambda r, x: (x, r.randint(-5, 4)),
    "permute.default": lambda r, x: (x, r.sample(range(4), 4)),
    **like("transpose.int movedim.int", lambda r, x: (x, *r.sample(range(4), 2))),
    "slice.Tensor": lambda r, x: (x, r.randint(1, 3), r.randint(0, 1), r.randint(2, 4), r.randint(1, 2)),
    "select.int": lambda r, x: (x, r.randint(1, 3), r.randint(-2, 3)),
    "narrow.default": lambda r, x: (x, r.randint(1, 3), 1, r.randint(1, 3)),
    **like("split.Tensor chunk.default", lambda r, x: (x, r.randint(1, 4), r.randint(1, 3))),
    "unbind.int": lambda r, x: (x, r.randint(0, 3)), "roll.default": lambda r, x: (x, [1, -2], [2, r.randint(0, 1)]),
    "flip.default": lambda r, x: (x, r.sample(range(4), 2)),
    "expand.default": lambda r, x: (x, [r.randint(1, 3), -1, -1, -1]),
    "repeat.default": lambda r, x: (x, [1, *r.sample([1, 2, 3], 3)]),
    "repeat_interleave.self_int": lambda r, x: (x, 2, r.randint(0, 3)),
    **like("pixel_shuffle.default pixel_unshuffle.default channel_shuffle.default", lambda r, x: (x, 2)),
    "unfold.default": lambda r, x: (x, r.randint(1, 3), r.randint(1, 4), r.randint(1, 2)),
    "diagonal.default": lambda r, x: (x, r.randint(-1, 1), *r.sample([1, 2, 3], 2)),
    **like("contiguous.default neg.default", lambda r, x: (x,)), "to.dtype": lambda r, x: (x, torch.float64),
    "dropout.default": lambda r, x: (x, 0.5, False), "copy.default": lambda r, x: (constant(*x.shape), x),
}  # fmt: skip
OTHERS: dict[str, Case] = {
    **like("cat.default stack.default", lambda r, x: ([x, torch.randn_like(x)], r.randint(1, 3))),
    "select_scatter.default": lambda r, x: (x, torch.randn_like(x[:, :, 0]), 2, 1),
    "slice_scatter.default": lambda r, x: (x, torch.randn_like(x[:, :, :2]), 2, 1, 3),
    "pad.default": lambda r, x: (x, [1, 0, r.randint(0, 2), 0, 0, r.randint(0, 1)]),
    "constant_pad_nd.default": lambda r, x: (x, [r.randint(-1, 2), 0, 0, 1]),
    "index.Tensor": lambda r, x: (x, [None, None, torch.tensor([1, 0, 1])]),
    "index_select.default": lambda r, x: (x, r.randint(1, 3), torch.tensor([1, 0])),
    "gather.default": lambda r, x: (x, 2, torch.randint(2, (1, x.shape[1], 2, x.shape[3]))),
    **like(
        "add.Tensor mul.Tensor maximum.default max.other",
        lambda r, x: (x, torch.rand([r.choice([1, size]) for size in x.shape[r.randint(0, 2) :]])),
    ),
    "where.self": lambda r, x: (constant(*x.shape) > 1, x, torch.randn_like(x[:, :1])),
    "glu.default": lambda r, x: (x, r.choice([dim for dim in (1, 2, 3) if x.shape[dim] % 2 == 0])),
    "prelu.default": lambda r, x: (x, constant(x.shape[1])),
    "batch_norm.default": lambda r, x: (x, *[constant(x.shape[1])] * 4, False, 0.1, 1e-5, False),
    "_native_batch_norm_legit_no_training.default": lambda r, x: (x, *[constant(x.shape[1])] * 4, 0.1, 1e-5),
    "matmul.default": lambda r, x: (x, torch.randn(x.shape[3], 3)),
    "linear.default": lambda r, x: (x, constant(5, x.shape[3])),
    "conv2d.default": lambda r, x: (x, constant(2 * x.shape[1], 1, 3, 3), None, *[[1, 1]] * 3, x.shape[1]),
    **like(
        """softmax.int log_softmax.int cumsum.default cumprod.default logcumsumexp.default sort.default argsort.default
        argmax.default argmin.default median.dim prod.dim_int max.dim min.dim""",
        lambda r, x: (x, r.randint(1, 3)),
    ),
    **like(
        """amax.default amin.default logsumexp.default mean.dim sum.dim_IntList var.dim std.dim nanmean.default
        count_nonzero.dim_IntList""",
        lambda r, x: (x, r.sample([1, 2, 3], r.randint(1, 2))),
    ),
    **like("linalg_vector_norm.default norm.ScalarOpt_dim", lambda r, x: (x, 2, [r.randint(1, 3)])),
    **like("topk.default kthvalue.default", lambda r, x: (x, 2, r.randint(1, 3))),
    "mean.default": lambda r, x: (x,),
    **like("layer_norm.default rms_norm.default", lambda r, x: (x, list(x.shape[r.randint(1, 3) :]))),
    "native_layer_norm.default": lambda r, x: (x, list(x.shape[3:]), None, None, 1e-5),
    "group_norm.default": lambda r, x: (x, r.choice([1, 2, 4, x.shape[1]]), constant(x.shape[1])),
    "instance_norm.default": lambda r, x: (x, *[None] * 4, True, 0.1, 1e-5, False),
    "im2col.default": lambda r, x: (x, [3, 2], [1, 1], [1, 0], [1, r.randint(1, 2)]),
    "col2im.default": lambda r, x: (torch.randn(1, 4 * x.shape[1], 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
    **like(
        "avg_pool2d.default max_pool2d.default max_pool2d_with_indices.default adaptive_avg_pool2d.default",
        lambda r, x: (x, [2, r.randint(1, 3)]),
    ),
    "upsample_bilinear2d.default": lambda r, x: (x, [5, r.randint(3, 9)], False),
    "grid_sampler.default": lambda r, x: (x, constant(1, 3, 3, 2), 0, 0, False),
    "new_zeros.default": lambda r, x: (x, [2, 3]),
    "cdist.default": lambda r, x: (x, torch.randn_like(x)),
}
# Ops that share the rule of an op above, or that tests of whole models narrow.
SHARED = """
_adaptive_avg_pool2d _log_softmax _softmax _to_copy _unsafe_view _upsample_bicubic2d_aa _upsample_bilinear2d_aa
_upsample_nearest_exact2d adaptive_avg_pool1d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
adaptive_max_pool3d addmm alias all alpha_dropout any avg_pool1d avg_pool3d baddbmm bmm broadcast_to clone concat
conv1d conv3d conv_transpose1d conv_transpose2d conv_transpose3d detach detach_ dropout_ einsum expand_as
feature_dropout lift_fresh lift_fresh_copy mT max_pool1d max_pool3d mm moveaxis new_empty new_full new_ones ravel
reshape_as resolve_conj resolve_neg softmin split_with_sizes std_mean swapaxes swapdims t tensor_split tile type_as
unsafe_chunk unsafe_split upsample_bicubic2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
upsample_nearest_exact2d upsample_trilinear3d var_mean view_as
"""
NARROWED = {"embedding", "getitem", "scaled_dot_product_attention"}


def program_of(op: Any, arguments: tuple[Any, ...]) -> Program:
    """Make a program of one call, in which parameters are constants and other tensors are inputs."""
    graph, constants = fx.Graph(), dict[str, Tensor]()

    def entering(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        name = f"constant_{len(constants)}" if isinstance(tensor, nn.Parameter) else f"input_{len(graph.nodes)}"
        node = graph.get_attr(name) if isinstance(tensor, nn.Parameter) else graph.placeholder(name)
        constants.update({name: tensor} if isinstance(tensor, nn.Parameter) else {})
        set_value(node, tensor)
        return node

    node = graph.call_function(op, tuple(tree_map(entering, arguments)))
    set_value(node, op(*arguments))
    graph.output(node)
    return Program(graph=fx.GraphModule(constants, graph), model="", any_batch=False, folded=())


def set_value(node: fx.Node, value: Any) -> None:
    """Set the value and the sizes of a node, at one batch size."""
    set_sizes(node, value, value)
    node.meta["val"] = value


def labelled(flow: Flow, draw: random.Random, tensor: Tensor) -> LabelTensor:
    """Draw new labels along one axis or several, none for tensors that aren't floats."""
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    axes = draw.sample(dims, draw.randint(min(1, len(dims)), len(dims)))
    if not axes or not tensor.is_floating_point():
        return LabelTensor(tuple(tensor.shape))
    labels = flow.fresh([size if dim in axes else 1 for dim, size in enumerate(tensor.shape)])
    return label_tensor(labels.expand(tensor.shape))


def changed(flow: Flow, node: fx.Node, group: int) -> Tensor:
    """Return an input with the elements of this group changed."""
    tensor, labels = torch.as_tensor(node.meta["val"]), flow.values[node].labels
    return tensor if labels is None else tensor + (flow.groups.of(labels) == group) * (0.3 + torch.rand(tensor.shape))


def check_labels(name: str, case: Case) -> list[bool]:
    """Check changes of some labels on shapes drawn from the op's name, and return whether all labels can go."""
    packet, _, overload = name.partition(".")
    op, draw, free = getattr(getattr(aten, packet), overload), random.Random(name), list[bool]()
    torch.manual_seed(len(name))
    for _ in range(DRAWS):
        x = torch.randn(1, draw.choice([4, 8, 12]), draw.choice([4, 6]), draw.choice([4, 6, 8]))
        program = program_of(op, case(draw, x))
        *before, node, _ = program.nodes
        inputs, flow = [each for each in before if each.op == "placeholder"], Flow(program=program)
        flow.values = {each: labelled(flow, draw, each.meta["val"]) for each in inputs}
        flow.values |= {each: evaluate_node(flow, each) for each in before if each not in inputs}
        groups = flow.groups.of(torch.arange(flow.groups.count))
        given = [each for each in tree_leaves(evaluate_node(flow, node)) if isinstance(each, LabelTensor)]
        summed = [flow.groups.of(use.labels) for use in flow.every_use if not use.is_of_constant]
        goes = ~find_stuck(flow)[flow.groups.of(groups)]
        free.append(bool(goes.all()))
        going = sorted(set(flow.groups.of(groups)[goes].tolist()))
        for group in draw.sample(going, min(CHANGES, len(going))):
            along = {group, *(int(each) for outer, inner in flow.held_groups() for each in inner[outer == group])}
            if any(bool((labels == group).any()) for labels in summed):
                continue
            after = tree_leaves(program.graph(*(changed(flow, each, group) for each in inputs)))
            for was, now, marks in zip(tree_leaves(node.meta["val"]), after, given, strict=True):
                found = torch.full(was.shape, -1) if marks.labels is None else flow.groups.of(marks.labels)
                assert marks.shape == tuple(was.shape)
                assert set(found[~torch.isclose(was, now, equal_nan=True)].tolist()) <= along, (name, group)
    return free


def unary() -> list[str]:
    """Return all elementwise ops of a single tensor."""
    names = {name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    ops = [getattr(getattr(aten, name, None), "default", None) for name in sorted(names) if name[-1] != "_"]
    return [str(op).removeprefix("aten.") for op in ops if isinstance(op, torch._ops.OpOverload) and _is_unary(op)]


def _is_unary(op: Any) -> bool:
    name, needed = op._schema.name[6:], [each for each in op._schema.arguments if not each.has_default_value()]
    is_one = len(needed) == len(op._schema.returns) == 1 and op.namespace == "aten"
    return is_one and is_pointwise(op) and name not in {*RULES, "clamp", "clip", "bitwise_not"}


@pytest.mark.parametrize("name", MOVES)
def test_moves_propagate_every_label(name: str) -> None:
    assert all(check_labels(name, MOVES[name]))


def test_elementwise_operations_keep_labels() -> None:
    assert len(unary()) > 70
    assert [name for name in unary() if not all(check_labels(name, lambda r, x: (x,)))] == []


@pytest.mark.parametrize("name", OTHERS)
def test_meeting_and_mixed_labels_are_joined(name: str) -> None:
    check_labels(name, OTHERS[name])


@pytest.mark.parametrize("op", [aten.softmax.int, aten.cumsum.default, aten.argmax.default])
def test_fully_joined_channels_are_kept(op: Any) -> None:
    program = program_of(op, (torch.randn(1, 6), 1))
    (source, node, _), flow = program.nodes, Flow(program=program)
    flow.values[source] = label_tensor(flow.fresh((1, 6)))
    assert evaluate_node(flow, node).labels is None
    assert bool(find_stuck(flow).all())


def test_every_rule_has_a_test() -> None:
    named = {name.partition(".")[0] for name in (*MOVES, *OTHERS)} & set(RULES)
    assert sorted(set(RULES) - named - NARROWED) == sorted(SHARED.split())
    assert {RULES[op] for op in SHARED.split()} <= {RULES[op] for op in named}
