"""timm's global response norms as those that can lose channels."""

from timm.layers.grn import GlobalResponseNorm
from torch import nn

from .modules import replaced
from .response_norm import ResponseNorm, mean_state


def response_norm(norm: GlobalResponseNorm) -> ResponseNorm:
    """The same norm for channels behind the tokens."""
    ours = ResponseNorm(len(norm.weight), norm.eps, device=norm.weight.device, dtype=norm.weight.dtype)
    ours.load_state_dict({**norm.state_dict(), **mean_state(ours)}, assign=True)
    return ours


def with_response_norms(model: nn.Module) -> nn.Module:
    """The model with timm's norms of channels behind as such layers; itself where it has none."""
    norms: dict[str, nn.Module] = {
        name: response_norm(module)
        for name, module in model.named_modules()
        if isinstance(module, GlobalResponseNorm) and module.channel_dim == -1
    }
    return replaced(model, norms) if norms else model
