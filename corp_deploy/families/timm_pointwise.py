"""ConvNeXt blocks whose MLP timm spells as 1x1 convolutions of a map: here linear layers of the map's tokens, which are
the same function, and convolutions again for a graph.

Legend: B images, C channels, H and W of a map, I inputs and O outputs of a layer.
"""

from timm.layers import GlobalResponseNormMlp, Mlp
from timm.models.convnext import ConvNeXtBlock
from torch import Tensor, nn

from .modules import linear, replaced
from .response_norm import ResponseNorm
from .timm_response import response_norm

_PARTS = ("conv_dw", "norm", "mlp", "shortcut", "drop_path")


class TokenMlpBlock(nn.Module):
    """x + gamma * mlp(norm(conv_dw(x))) of a map [B,C,H,W], the MLP in tokens; its parts go by the names of timm's."""

    gamma: nn.Parameter | None

    def __init__(self, block: nn.Module, mlp: nn.Module) -> None:
        """`block` is timm's."""
        super().__init__()
        self.conv_dw, self.norm, self.mlp, self.shortcut, self.drop_path = (
            mlp if name == "mlp" else block.get_submodule(name) for name in _PARTS
        )
        self.register_parameter("gamma", gamma_of(block))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv_dw(x))
        y = self.mlp(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if self.gamma is not None:
            y = y * self.gamma.reshape(1, -1, 1, 1)
        out: Tensor = self.drop_path(y) + self.shortcut(x)
        return out


def gamma_of(block: nn.Module) -> nn.Parameter | None:
    """The layer scale of a block [C], None without one."""
    return dict(block.named_parameters(recurse=False)).get("gamma")


def _linear(convolution: nn.Module) -> nn.Linear:
    """[O,I,1,1] -> [O,I], the same memory."""
    assert isinstance(convolution, nn.Conv2d), convolution
    where = {"device": convolution.weight.device, "dtype": convolution.weight.dtype}
    bias = convolution.bias is not None
    layer = linear(convolution.in_channels, convolution.out_channels, bias=bias, **where)
    layer.weight = nn.Parameter(convolution.weight.detach()[:, :, 0, 0])
    if convolution.bias is not None:
        layer.bias = nn.Parameter(convolution.bias.detach())
    return layer


def _convolution(layer: nn.Module) -> nn.Conv2d:
    """[O,I] -> [O,I,1,1]."""
    assert isinstance(layer, nn.Linear), layer
    where, dtype = layer.weight.device, layer.weight.dtype
    bias = layer.bias is not None
    convolution = nn.Conv2d(layer.in_features, layer.out_features, 1, bias=bias, device=where, dtype=dtype)
    convolution.weight = nn.Parameter(layer.weight.detach()[:, :, None, None])
    if layer.bias is not None:
        convolution.bias = nn.Parameter(layer.bias.detach())
    return convolution


def with_token_mlps(model: nn.Module) -> nn.Module:
    """The model with its MLPs of convolutions as linear layers; itself where it has none."""
    blocks: dict[str, nn.Module] = {}
    for name, block in model.named_modules():
        if type(block) is ConvNeXtBlock and block.use_conv_mlp and type(block.mlp) in (Mlp, GlobalResponseNormMlp):
            layers: dict[str, nn.Module] = {each: _linear(block.mlp.get_submodule(each)) for each in ("fc1", "fc2")}
            if isinstance(block.mlp, GlobalResponseNormMlp):
                layers["grn"] = response_norm(block.mlp.grn)
            blocks[name] = TokenMlpBlock(block, replaced(block.mlp, layers))
    return replaced(model, blocks) if blocks else model


def with_convolutions(model: nn.Module) -> nn.Module:
    """A copy with those MLPs as timm spells them, but for such as a constant is left of or a norm stands in."""
    blocks: dict[str, nn.Module] = {}
    for name, block in model.named_modules():
        if not isinstance(block, TokenMlpBlock) or any(isinstance(each, ResponseNorm) for each in block.modules()):
            continue
        if isinstance(block.mlp.get_submodule("fc2"), nn.Linear):
            layers = {each: _convolution(block.mlp.get_submodule(each)) for each in ("fc1", "fc2")}
            blocks[name] = _of_convolutions(block, replaced(block.mlp, layers))
    return replaced(model, blocks)


def _of_convolutions(block: TokenMlpBlock, mlp: nn.Module) -> ConvNeXtBlock:
    """timm's block with the parts of one in tokens."""
    plain = ConvNeXtBlock.__new__(ConvNeXtBlock)
    nn.Module.__init__(plain)
    for name in _PARTS:
        plain.add_module(name, mlp if name == "mlp" else block.get_submodule(name))
    plain.register_parameter("gamma", block.gamma)
    plain.use_conv_mlp = True
    return plain
