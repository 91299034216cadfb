"""timm's windowed blocks made into layers of whole maps: the same weights, and the same function.

timm cuts a map into windows in front of the attention, so that the leading axis of all that the attention sees is
images times windows. Here windows are cut inside the attention.
"""

from collections.abc import Mapping

from timm.layers import to_2tuple
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.swin_transformer import WindowAttention as TimmWindowAttention
from timm.models.swin_transformer_v2 import SwinTransformerV2Block
from timm.models.swin_transformer_v2 import WindowAttention as TimmWindowAttentionV2
from torch import Tensor, nn

from .cosine import ScaledUnitLength, UnitLength
from .head_attention import HeadAttention
from .maps import Grid
from .modules import replaced
from .position_bias import ContinuousBias, TableBias
from .timm_placed import HeadLayout, head_attention, head_state
from .windows import WindowPlan, Windows

State = Mapping[str, Tensor]
TimmBlock = SwinTransformerBlock | SwinTransformerV2Block
_OF_TIMM = (SwinTransformerBlock, SwinTransformerV2Block)
TABLE = "relative_position_bias_table"


class WindowBlock(nn.Module):
    """x + attn(norm1(x)), then x + mlp(norm2(x)), of maps [B,H,W,C] as a stage has them; where norms are `behind`, of
    what the layers give. Parts go by the names of timm's block; in evaluation its drop-path is the identity.
    """

    def __init__(self, block: nn.Module, attn: HeadAttention, layout: HeadLayout, *, behind: bool) -> None:
        """`block` is timm's, `layout` that of its attention."""
        super().__init__()
        assert attn.windows is not None
        self.norm1, self.attn = block.get_submodule("norm1"), attn
        self.norm2, self.mlp = block.get_submodule("norm2"), block.get_submodule("mlp")
        self.grid: Grid = attn.windows.plan.grid
        self.window: Grid = attn.windows.plan.window
        self.layout, self.behind = layout, behind

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1:3] == self.grid, (x.shape, self.grid)
        x_BNC = x.flatten(1, 2)
        for norm, layer in ((self.norm1, self.attn), (self.norm2, self.mlp)):
            x_BNC = x_BNC + (norm(layer(x_BNC)) if self.behind else layer(norm(x_BNC)))
        out_BHWC: Tensor = x_BNC.unflatten(1, self.grid)
        return out_BHWC


def block_refusal(block: nn.Module) -> str:
    """Why the attention of a block can't be reduced, or nothing."""
    if isinstance(block, WindowBlock):
        return ""
    if type(block) not in _OF_TIMM:
        return f"block is {type(block).__name__}, expected timm's SwinTransformerBlock or SwinTransformerV2Block"
    if block.dynamic_mask:
        return "dynamic_img_size: its windows are those of each image's own size; build it for one size (img_size)"
    return (
        "timm's block cuts its windows in front of the attention; a model that corp-deploy builds has them inside, as "
        "with_inner_windows of corp_deploy.families.timm_windows makes them"
    )


def _plan(block: TimmBlock) -> WindowPlan:
    height, width = to_2tuple(block.input_resolution)
    rows, columns = block.window_size
    down, right = block.shift_size
    return WindowPlan(grid=(height, width), window=(rows, columns), shift=(down, right))


def _biased(attention: TimmWindowAttention, plan: WindowPlan, layout: HeadLayout) -> HeadAttention:
    bias = TableBias(attention.relative_position_bias_table, plan.relative())
    return head_attention(attention, layout, position_bias=bias)


def _of_cosines(attention: TimmWindowAttentionV2, plan: WindowPlan, layout: HeadLayout) -> HeadAttention:
    """Its scale is a part of the queries."""
    rows, columns = to_2tuple(attention.pretrained_window_size)
    bias = ContinuousBias(attention.cpb_mlp, plan.log_places((rows, columns)), plan.relative())
    ours = head_attention(attention, layout, position_bias=bias)
    ours.scale, ours.q_norm, ours.k_norm = 1.0, ScaledUnitLength(attention.logit_scale), UnitLength()
    return ours


def _made_whole(block: TimmBlock) -> WindowBlock:
    theirs, plan = block.attn, _plan(block)
    weight = theirs.qkv.weight
    layout = HeadLayout(heads=theirs.num_heads, width=len(weight) // (3 * theirs.num_heads))
    if isinstance(theirs, TimmWindowAttentionV2):
        ours = _of_cosines(theirs, plan, layout)
    else:
        assert isinstance(theirs, TimmWindowAttention), theirs
        ours = _biased(theirs, plan, layout)
    ours.windows = Windows(plan)
    behind = isinstance(block, SwinTransformerV2Block)
    return WindowBlock(block, ours.to(weight.device), layout, behind=behind)


def with_inner_windows(model: nn.Module) -> nn.Module:
    """The model with its blocks of windows as layers of whole maps; itself where it has none, or of any image size."""
    blocks: dict[str, nn.Module] = {}
    for name, block in model.named_modules():
        if isinstance(block, SwinTransformerBlock | SwinTransformerV2Block) and not block.dynamic_mask:
            blocks[name] = _made_whole(block)
    return replaced(model, blocks) if blocks else model


def window_blocks(model: nn.Module) -> list[tuple[str, WindowBlock]]:
    """Those that cut their windows inside, with their names."""
    return [(name, block) for name, block in model.named_modules() if isinstance(block, WindowBlock)]


def own_state(model: nn.Module, state: State) -> dict[str, Tensor]:
    """A state under timm's names as that of a model with such blocks."""
    ours = dict(state)
    for name, block in window_blocks(model):
        prefix = f"{name}.attn."
        timms = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        of_attention = head_state(timms, block.layout) | _renamed(timms)
        ours = {key: value for key, value in ours.items() if not key.startswith(prefix)}
        ours |= {f"{prefix}{key}": value for key, value in of_attention.items()}
    return ours


def _renamed(state: State) -> dict[str, Tensor]:
    """What of an attention has another name where it is a part of ours."""
    names = {TABLE: "position_bias.table", "logit_scale": "q_norm.logit_scale"}
    names |= {key: f"position_bias.{key}" for key in state if key.startswith("cpb_mlp.")}
    return {ours: state[theirs] for theirs, ours in names.items() if theirs in state}
