"""timm's layers of maps as layers of tokens: 1x1 convolutions with the batch norm behind them as one linear layer,
attention of any order of rows as HeadAttention, norms over channels.

Legend: I inputs and O outputs of a layer, H heads.
"""

import torch
from timm.layers import BatchNormAct2d, LayerNorm2d, RelPosBias, RelPosBiasTf, RelPosMlp
from timm.models import efficientformer, tiny_vit
from torch import Tensor, nn

from .depthwise import Depthwise, convolution
from .head_attention import HeadAttention
from .maps import Grid, OnMap, grid_behind
from .modules import linear
from .pointwise_mlp import PointwiseMlp
from .position_bias import TableBias
from .windows import WindowPlan, Windows

Weights = tuple[Tensor, Tensor | None]


def is_folded(norm: nn.Module | None) -> bool:
    """Whether a norm is none in evaluation beside the layer before it."""
    return norm is None or isinstance(norm, nn.Identity) or type(norm) is nn.BatchNorm2d


def has_activation(norm: nn.Module) -> bool:
    """Whether it is a batch norm that has the activation behind it as a part of its own, `act`."""
    return type(norm) is BatchNormAct2d and isinstance(norm.drop, nn.Identity)


def _through(weight_OI: Tensor, bias_O: Tensor | None, norm: nn.Module | None) -> Weights:
    """Weight and bias of a layer and the batch norm behind it together, which in evaluation is a map of each channel:
    (x - mean) / sqrt(variance + eps) * weight + bias (arXiv 1502.03167, algorithm 2).
    """
    if not isinstance(norm, nn.BatchNorm2d):
        return weight_OI, bias_O
    assert norm.running_mean is not None, norm
    assert norm.running_var is not None, norm
    ones_O = torch.ones_like(norm.running_var)
    gain_O = (ones_O if norm.weight is None else norm.weight).double() / (norm.running_var.double() + norm.eps).sqrt()
    before_O = -norm.running_mean.double() if bias_O is None else bias_O.double() - norm.running_mean.double()
    shift_O = 0.0 if norm.bias is None else norm.bias.double()
    weight = (weight_OI.double() * gain_O[:, None]).to(weight_OI.dtype)
    return weight, (before_O * gain_O + shift_O).to(weight_OI.dtype)


def weights_of(layer: nn.Module, norm: nn.Module | None = None) -> Weights:
    """Weight [O,I] and bias of a linear layer or a 1x1 convolution, with the batch norm behind it."""
    assert isinstance(layer, nn.Linear | nn.Conv2d), layer
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    if weight.ndim == 4:
        assert weight.shape[2:] == (1, 1), layer
        weight = weight[:, :, 0, 0]
    return _through(weight, bias, norm)


def _set_(layer: nn.Linear, weights: Weights) -> nn.Linear:
    """The layer with these weights, whose memory it shares where it can."""
    weight_OI, bias_O = weights
    layer.weight = nn.Parameter(weight_OI.contiguous())
    if bias_O is not None:
        layer.bias = nn.Parameter(bias_O.contiguous())
    return layer


def as_linear(layer: nn.Module, norm: nn.Module | None = None) -> nn.Linear:
    """The same function of a token, of a layer and the batch norm behind it."""
    weight_OI, bias_O = weights_of(layer, norm)
    where = {"device": weight_OI.device, "dtype": weight_OI.dtype}
    empty = linear(weight_OI.shape[1], weight_OI.shape[0], bias=bias_O is not None, **where)
    return _set_(empty, (weight_OI, bias_O))


def pointwise_mlp(mlp: nn.Module, norms: tuple[str, str] = ("", "")) -> PointwiseMlp:
    """timm's MLP of layers fc1 and fc2; `norms`: the names of those behind each."""
    norm1, norm2 = (mlp.get_submodule(name) if name else None for name in norms)
    fc1, fc2 = (as_linear(mlp.get_submodule(name), norm) for name, norm in (("fc1", norm1), ("fc2", norm2)))
    return PointwiseMlp(fc1, mlp.get_submodule("act"), fc2)


def depthwise(conv: nn.Module, norm: nn.Module, grid: Grid) -> Depthwise | None:
    """A convolution of each channel with the batch norm behind it; None where it is something else or makes another
    map.
    """
    if type(conv) is not nn.Conv2d or conv.groups != conv.in_channels or conv.out_channels != conv.in_channels:
        return None
    if grid_behind(conv, conv.in_channels, grid)[1] != grid or not (is_folded(norm) or has_activation(norm)):
        return None
    weight = conv.weight.detach()
    folded_FT, bias_F = _through(weight.flatten(1), None if conv.bias is None else conv.bias.detach(), norm)
    ours = convolution(conv, conv.out_channels, bias=bias_F is not None)
    ours.weight = nn.Parameter(folded_FT.view_as(weight))
    if bias_F is not None:
        ours.bias = nn.Parameter(bias_F)
    return Depthwise(ours, grid)


def norm_of_tokens(norm: nn.Module, grid: Grid) -> nn.Module:
    """A norm of maps for tokens."""
    if type(norm) is not LayerNorm2d:
        return norm if isinstance(norm, nn.LayerNorm) and not isinstance(norm, LayerNorm2d) else OnMap(norm, grid)
    ours = nn.LayerNorm(norm.normalized_shape[0], eps=norm.eps, device=norm.weight.device, dtype=norm.weight.dtype)
    ours.weight, ours.bias = norm.weight, norm.bias
    return ours


def _by_kind(rows: Tensor, heads: int, qk: int, v: int) -> Tensor:
    """Rows of head after head, each its queries, keys and values, as queries of all heads, then keys, then values."""
    by_head = rows.unflatten(0, (heads, 2 * qk + v)).split((qk, qk, v), dim=1)
    return torch.cat([part.flatten(0, 1) for part in by_head])


def head_attention(
    qkv: Weights,
    proj: Weights,
    *,
    heads: int,
    qk: int,
    v: int,
    scale: float,
    by_head: bool,
    q_norm: nn.Module | None = None,
    position_bias: nn.Module | None = None,
    windows: Windows | None = None,
) -> HeadAttention:
    """An attention with these weights; `by_head`: rows are those of head after head."""
    weight_RI, bias_R = qkv
    if by_head:
        weight_RI = _by_kind(weight_RI, heads, qk, v)
        bias_R = None if bias_R is None else _by_kind(bias_R, heads, qk, v)
    with torch.device(weight_RI.device):
        ours = HeadAttention(
            dim=weight_RI.shape[1],
            out=proj[0].shape[0],
            heads=heads,
            qk=qk,
            v=v,
            scale=scale,
            geometry="square" if qk == v else "ragged",
            qkv_bias=bias_R is not None,
            proj_bias=proj[1] is not None,
            q_norm=q_norm,
        )
    _set_(ours.qkv, (weight_RI, bias_R))
    _set_(ours.proj, proj)
    ours.position_bias = position_bias
    ours.windows = None if windows is None else windows.to(weight_RI.device)
    return ours


def levit_attention(theirs: nn.Module, windows: Windows | None = None) -> HeadAttention:
    """LeViT's attention, as TinyViT and EfficientFormer have it: rows head after head, a table of biases."""
    assert isinstance(theirs, efficientformer.Attention | tiny_vit.Attention), theirs
    index_NN = theirs.attention_bias_idxs
    assert isinstance(index_NN, Tensor), theirs
    return head_attention(
        weights_of(theirs.qkv),
        weights_of(theirs.proj),
        heads=theirs.num_heads,
        qk=theirs.key_dim,
        v=theirs.val_dim,
        scale=float(theirs.scale),
        by_head=True,
        position_bias=TableBias(theirs.attention_biases.T, index_NN),
        windows=windows,
    )


@torch.no_grad()
def position_bias(source: nn.Module | None) -> TableBias | None:
    """timm's relation between the tokens of a window as one table, its network run once; None for None."""
    if source is None:
        return None
    assert isinstance(source, RelPosBias | RelPosBiasTf | RelPosMlp), source
    rows, columns = source.window_size
    tokens = rows * columns
    if isinstance(source, RelPosBiasTf):
        index_NN = WindowPlan(grid=(rows, columns), window=(rows, columns)).relative().T
        table_HHW = source.relative_position_bias_table
        return TableBias(table_HHW.flatten(1).T, index_NN.to(table_HHW.device))
    index = source.relative_position_index
    assert isinstance(index, Tensor), source
    if isinstance(source, RelPosBias):
        return TableBias(source.relative_position_bias_table, index.view(tokens, tokens))
    table_TH: Tensor = source.bias_act(source.mlp(source.rel_coords_log).flatten(0, 1))
    return TableBias(table_TH if source.bias_gain is None else source.bias_gain * table_TH, index.view(tokens, tokens))
