"""Which places of what a traced model's linear layers give its outputs read, as read_tokens.py has it of tokens.

Legend: B random streams, N tokens of a stream, C channels, P places behind the batch.
"""

import torch
from torch import Tensor, fx

from corp_deploy.traced.finding.cuts import cuts, needed, outputs_behind
from corp_deploy.traced.models.module import Tracing
from corp_deploy.traced.models.segments import layout_of, without_padding
from corp_deploy.traced.programs.program import IN_FRONT, Program, batch_of, sizes_at_one
from corp_deploy.traced.programs.readers import LINEAR, layers

from .read_tokens import drawn, random_stream
from .traced_streams import run


def places_read(dense: Tracing, where: torch.device) -> dict[fx.Node, Tensor]:
    """Of linear layers of which some places [P] alone are read, which; those behind the first cut are looked at."""
    program, read = dense.program, dict[fx.Node, Tensor]()
    linear = [each.node for each in layers(program) if each.node.target is LINEAR and batch_of(each.node) == IN_FRONT]
    (entering, *_) = [node for node in program.nodes if node.op == "placeholder"]
    for cut in reversed(cuts(dense.analysis, beside_outputs=True)):
        layout = layout_of(cut.node, sizes_at_one(entering)[1:])
        like_1NC = layout.rows(torch.empty(1, *layout.sizes, device=where))
        with torch.inference_mode(False), torch.enable_grad():
            stream_BNC = random_stream(like_1NC)
            gradient_BNC, *gradients = _gradients(
                program, cut.node, stream_BNC, layout.tensor(stream_BNC.clone()), linear
            )
        for node, gradient in zip(linear, gradients, strict=True):
            if gradient is not None:
                read.setdefault(node, (gradient != 0.0).any(-1).any(0).flatten())
        if gradient_BNC is None or bool((gradient_BNC != 0.0).any(2).any(0).all()):
            break
    return {node: places_P for node, places_P in read.items() if bool(places_P.any()) and not bool(places_P.all())}


def _gradients(
    program: Program, cut: fx.Node, stream_BNC: Tensor, x: Tensor, nodes: list[fx.Node]
) -> list[Tensor | None]:
    """Of the outputs by a stream, which is `x` at a cut, and by what each of these nodes gives."""
    outputs = outputs_behind(program, cut)
    values = run(program, needed(program, cut, outputs), {cut: x, **without_padding(program, len(x), x.device)})
    terms = [drawn(each) for node in outputs if (each := values[node]).requires_grad]
    own = [values[node] if node in values and values[node].requires_grad else None for node in nodes]
    inputs = [stream_BNC, *(each for each in own if each is not None)]
    found = iter(torch.autograd.grad(sum(terms), inputs, allow_unused=True) if terms else [None] * len(inputs))  # type: ignore[arg-type]
    return [next(found), *(None if each is None else next(found) for each in own)]
