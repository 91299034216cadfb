"""Which tokens of the last residual stream a model's outputs read: those that a closed loop's last block is fitted to.

Legend: B random streams, N tokens, C channels.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from calib.inputs import Inputs
from calib.sites import evaluating
from corp_deploy.families import traced_model
from corp_deploy.families.family import answers, example_of, gives_patches, steps_to_outputs
from corp_deploy.traced.models.steps import StreamState

Reads = Literal["all", "pooled"]
_DRAWS = 16  # channels drawn for each token, so that a maximum over tokens falls on every one of them
_MOST_STREAMS = 64


def random_stream(like_1NC: Tensor) -> Tensor:
    """Several [B,N,C], whose gradient can be asked."""
    tokens, channels = like_1NC.shape[1:]
    count = min(math.ceil(_DRAWS * tokens / channels), _MOST_STREAMS)
    generator = torch.Generator(device="cpu").manual_seed(0)
    stream_BNC = torch.randn(count, tokens, channels, generator=generator, device="cpu")
    return stream_BNC.to(like_1NC).requires_grad_()


def _walked(model: nn.Module, inputs: Inputs) -> StreamState:
    walk = StreamState.of(traced_model.embedded(model, inputs), traced_model.token_weights(model, inputs))
    for step in steps_to_outputs(model):
        walk = walk.behind(step)
    return walk


def _with_last(walk: StreamState, x_BNC: Tensor) -> StreamState:
    """The end of a walk with this last stream, at the outlets behind the last step too."""
    last = walk.tokens._replace(x=x_BNC)
    kept = tuple((name, last if tokens is walk.tokens else tokens) for name, tokens in walk.kept)
    return StreamState(tokens=last, kept=kept)


def drawn(output: Tensor) -> Tensor:
    """A random sum of an output's numbers."""
    generator = torch.Generator(device="cpu").manual_seed(1)
    return (output * torch.randn(output.shape, generator=generator, device="cpu").to(output)).sum()


def _is_read(model: nn.Module) -> Tensor:
    """Of each token of the last stream: whether the outputs' gradient by random last streams is not zero there."""
    with torch.inference_mode(False), evaluating(model):
        example = example_of(model)
        with torch.no_grad():
            walk = _walked(model, example)
        with torch.enable_grad():
            stream_BNC = random_stream(walk.tokens.x)
            outputs = answers(model, _with_last(walk, stream_BNC), example)
            total = torch.stack([drawn(output) for output in outputs]).sum()
            (gradient_BNC,) = torch.autograd.grad(total, stream_BNC)
    return (gradient_BNC != 0.0).any(dim=2).any(dim=0)


def counts_all(model: nn.Module, reads: Reads | None) -> bool:
    """Whether all tokens count, read or not, see tokens_to_fit."""
    return reads == "all" or (reads is None and gives_patches(model))


def tokens_to_fit(model: nn.Module, reads: Reads | None = None) -> Tensor | None:
    """The tokens behind the last block whose error counts, None for all.

    `pooled`: those that the outputs read. Without a choice likewise, but all of a model without a classifier and
    outputs by name, whose users read its patch tokens too. A model whose outputs nothing moves is fitted to all.
    """
    if counts_all(model, reads):
        return None
    is_read_N = _is_read(model)
    tokens = is_read_N.nonzero().squeeze(1)
    return None if len(tokens) in (0, len(is_read_N)) else tokens
