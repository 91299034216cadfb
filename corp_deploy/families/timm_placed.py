"""timm's blocks whose attention is told from outside where tokens are, as blocks whose attention knows it itself.

Their attention has one layer for queries, keys and values with one bias, and a head's planes are dimensions p and
p + P, whichever way timm's are. Positions are those of one image size, that of the model as it was built.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .head_attention import HeadAttention
from .rotary import Rotary

State = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayout:
    """How timm's attention lays its heads out; `interleaved`: a plane is two neighbouring dimensions."""

    heads: int
    width: int
    interleaved: bool = False

    def in_planes(self, rows: Tensor) -> Tensor:
        """Rows of all heads [H*D,...] or of one [D,...], planes as dimensions p and p + P."""
        if not self.interleaved:
            return rows
        by_plane: Tensor = rows.unflatten(0, (-1, self.width // 2, 2))
        return by_plane.transpose(1, 2).flatten(0, 2)


class PlacedBlock(nn.Module):
    """x + scale * layer(norm(x)), or where the norm is `behind` x + norm(layer(x)), for the attention and for the MLP.

    Parts go by the names of timm's blocks. `layout`: that of the timm's attention that ours was made of, None where the
    attention is still timm's.
    """

    gamma_1: nn.Parameter | None
    gamma_2: nn.Parameter | None

    def __init__(
        self,
        block: nn.Module,
        attn: nn.Module,
        scales: tuple[nn.Parameter | None, nn.Parameter | None],
        *,
        behind: bool,
        layout: HeadLayout | None,
    ) -> None:
        """`block` is timm's."""
        super().__init__()
        self.norm1, self.attn = block.get_submodule("norm1"), attn
        self.norm2, self.mlp = block.get_submodule("norm2"), block.get_submodule("mlp")
        self.register_parameter("gamma_1", scales[0])
        self.register_parameter("gamma_2", scales[1])
        self.behind, self.layout = behind, layout

    def forward(
        self, x: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False, **positions: Tensor | None
    ) -> Tensor:
        """[B,N,C] -> [B,N,C]; the positions that timm's model tells are those that the attention knows."""
        if attn_mask is not None or is_causal:
            raise ValueError("a block whose attention knows its positions takes no attention mask")
        for norm, layer, scale in ((self.norm1, self.attn, self.gamma_1), (self.norm2, self.mlp, self.gamma_2)):
            y: Tensor = norm(layer(x)) if self.behind else layer(norm(x))
            x = x + (y if scale is None else scale * y)
        return x


class Told(nn.Module):
    """timm's own attention with the sines and cosines [N,D] that it is told, where it can't be one of ours."""

    sin_cos_ND: Tensor

    def __init__(self, inner: nn.Module, sin_cos_ND: Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("sin_cos_ND", sin_cos_ND)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x, rope=self.sin_cos_ND)
        return out


def _bias(state: State, layout: HeadLayout) -> Tensor | None:
    """Of queries, keys and values together, zeros where one has none; None where all have none."""
    if "qkv.bias" in state:
        return state["qkv.bias"]
    names = (("q_bias", "q_proj.bias"), ("k_bias", "k_proj.bias"), ("v_bias", "v_proj.bias"))
    biases = [next((state[name] for name in pair if name in state), None) for pair in names]
    like = next((bias for bias in biases if bias is not None), None)
    if like is None:
        return None
    nothing = like.new_zeros(layout.heads * layout.width)
    return torch.cat([nothing if bias is None else bias for bias in biases])


def head_state(state: State, layout: HeadLayout) -> dict[str, Tensor]:
    """The state of one of timm's attentions as HeadAttention's, without positions. KeyError where one lacks."""
    weight = state.get("qkv.weight")
    if weight is None:
        weight = torch.cat([state[f"{name}_proj.weight"] for name in "qkv"])
    rows = {"qkv.weight": weight} | ({} if (bias := _bias(state, layout)) is None else {"qkv.bias": bias})
    ours = {}
    for name, whole in rows.items():
        queries, keys, values = whole.chunk(3)
        ours[name] = torch.cat([layout.in_planes(queries), layout.in_planes(keys), values])
    for name, value in state.items():
        if name.startswith(("q_norm.", "k_norm.")):
            ours[name] = layout.in_planes(value)
        elif name.startswith(("norm.", "proj.")):
            ours[name] = value
    return ours


def head_attention(
    attention: nn.Module,
    layout: HeadLayout,
    *,
    rotary: Rotary | None = None,
) -> HeadAttention:
    """One of timm's attentions as ours, with its weights."""
    state = head_state(dict(attention.state_dict()), layout)
    weight = state["qkv.weight"]
    norms = dict(attention.named_children())
    with torch.device(weight.device):
        ours = HeadAttention(
            dim=weight.shape[1],
            heads=layout.heads,
            qk=layout.width,
            v=layout.width,
            scale=layout.width**-0.5,
            geometry="square",
            qkv_bias="qkv.bias" in state,
            proj_bias="proj.bias" in state,
            q_norm=norms.get("q_norm"),
            k_norm=norms.get("k_norm"),
            norm=norms.get("norm"),
        )
    ours.to(weight.dtype).load_state_dict(state, assign=True)
    ours.rotary = rotary
    return ours


def placed_blocks(model: nn.Module) -> list[tuple[str, PlacedBlock]]:
    """Those that know their positions, with their names."""
    return [(name, block) for name, block in model.named_modules() if isinstance(block, PlacedBlock)]


def _under_own_names(name: str, block: PlacedBlock, state: State) -> dict[str, Tensor]:
    """What of a state under timm's names is an attention's."""
    timms = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
    if block.layout is None:
        return {f"{name}.inner.{key}": value for key, value in timms.items()}
    return {f"{name}.{key}": value for key, value in head_state(timms, block.layout).items()}


def own_state(model: nn.Module, state: State) -> dict[str, Tensor]:
    """A state under timm's names as that of a model with placed blocks; tables of positions are the model's own."""
    ours = dict(state)
    for name, block in placed_blocks(model):
        of_attention = _under_own_names(f"{name}.attn", block, state)
        ours = {key: value for key, value in ours.items() if not key.startswith(f"{name}.attn.")} | of_attention
        for each, module in block.attn.named_modules():
            if isinstance(module, Rotary | Told):
                prefix = ".".join(filter(None, (f"{name}.attn", each)))
                ours |= {f"{prefix}.{key}": value for key, value in module.named_buffers(recurse=False)}
    return ours
