"""The places of linear layers' outputs, such as tokens, on which a model's outputs depend.

A closed loop fits to these places only. They are found by the outputs' gradients for random streams.

Legend: B random streams, N tokens of a stream, C channels, P places of one input's output, each a vector of channels.
"""

import math
from typing import Literal

import torch
from torch import Tensor, fx, nn

from corp_deploy.families.family import gives_patches
from corp_deploy.traced.finding.cuts import find_cuts, outputs_after, required_nodes
from corp_deploy.traced.models.module import Tracing
from corp_deploy.traced.models.segments import build_full_masks, layout_of
from corp_deploy.traced.programs.program import IN_FRONT, Program, batch_axis_of, sizes_at_one
from corp_deploy.traced.programs.readers import LINEAR, layers

from .stream_walk import run_on_batch

Reads = Literal["all", "pooled"]
_DRAWS = 16  # channels drawn for each token, so that a maximum over tokens falls on every one of them
_MOST_STREAMS = 64


def random_stream(like_1NC: Tensor) -> Tensor:
    """Return normal random streams [B,N,C], the same in every call, that require gradients."""
    tokens, channels = like_1NC.shape[1:]
    count = min(math.ceil(_DRAWS * tokens / channels), _MOST_STREAMS)
    generator = torch.Generator(device="cpu").manual_seed(0)
    stream_BNC = torch.randn(count, tokens, channels, generator=generator, device="cpu")
    return stream_BNC.to(like_1NC).requires_grad_()


def random_sum(output: Tensor) -> Tensor:
    """Return the sum of an output's elements, times normal random numbers that are the same in every call."""
    generator = torch.Generator(device="cpu").manual_seed(1)
    return (output * torch.randn(output.shape, generator=generator, device="cpu").to(output)).sum()


def counts_all(model: nn.Module, reads: Reads | None) -> bool:
    """Return whether the errors of all tokens count, also of those on which no output depends.

    `pooled`: only the tokens count that the outputs read. None is the same, except for a model without a classifier and
    without named outputs: users read its patch tokens too, so all count.
    """
    return reads == "all" or (reads is None and gives_patches(model))


def find_read_places(dense: Tracing, where: torch.device) -> dict[fx.Node, Tensor]:
    """Return, by linear layer behind the first cut, the mask [P] of places on which outputs depend, if not all do."""
    program, read = dense.program, dict[fx.Node, Tensor]()
    nodes = [each.node for each in layers(program)]
    linear = [node for node in nodes if node.target is LINEAR and batch_axis_of(node) == IN_FRONT]
    for cut in reversed(find_cuts(dense.analysis, beside_outputs=True)):
        layout = layout_of(cut.node, sizes_at_one(program.inputs[0])[1:])
        like_1NC = layout.rows(torch.empty(1, *layout.sizes, device=where))
        with torch.inference_mode(False), torch.enable_grad():
            stream_BNC = random_stream(like_1NC)
            x = layout.tensor(stream_BNC.clone())
            gradient_BNC, *gradients = _gradients(program, cut.node, stream_BNC, x, linear)
        for node, gradient in zip(linear, gradients, strict=True):
            if gradient is not None:
                read.setdefault(node, (gradient != 0.0).any(-1).any(0).flatten())
        if gradient_BNC is None or bool((gradient_BNC != 0.0).any(2).any(0).all()):
            break
    return {node: places_P for node, places_P in read.items() if bool(places_P.any()) and not bool(places_P.all())}


def _gradients(
    program: Program, cut: fx.Node, stream_BNC: Tensor, x: Tensor, nodes: list[fx.Node]
) -> list[Tensor | None]:
    """Return the gradients of the program's outputs by the stream at a cut, and by the outputs of these nodes.

    `x` is the stream in the layout of the cut's own tensor.
    """
    outputs = outputs_after(program, cut)
    entering = {cut: x, **build_full_masks(program, len(x), x.device)}
    values = run_on_batch(program, required_nodes(program, cut, outputs), entering)
    terms = [random_sum(each) for node in outputs if (each := values[node]).requires_grad]
    own = [values[node] if node in values and values[node].requires_grad else None for node in nodes]
    inputs = [stream_BNC, *(each for each in own if each is not None)]
    found = iter(torch.autograd.grad(sum(terms), inputs, allow_unused=True) if terms else [None] * len(inputs))  # type: ignore[arg-type]
    return [next(found), *(None if each is None else next(found) for each in own)]
