"""timm's windowed blocks made into layers of whole maps: the same weights, and the same function.

timm cuts a map into windows in front of the attention, so that the leading axis of all that the attention sees is
images times windows. Here windows are cut inside the attention.
"""

from collections.abc import Mapping

from timm.layers import to_2tuple
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.swin_transformer import WindowAttention as TimmWindowAttention
from torch import Tensor, nn

from .head_attention import HeadAttention
from .maps import Grid
from .modules import replaced
from .position_bias import TableBias
from .timm_placed import HeadLayout, head_attention, head_state
from .windows import WindowPlan, Windows

State = Mapping[str, Tensor]
TABLE = "relative_position_bias_table"


class WindowBlock(nn.Module):
    """x + attn(norm1(x)), then x + mlp(norm2(x)), of maps [B,H,W,C] as a stage has them. Parts go by the names of
    timm's block; in evaluation its drop-path is the identity.
    """

    def __init__(self, block: nn.Module, attn: HeadAttention, layout: HeadLayout) -> None:
        """`block` is timm's, `layout` that of its attention."""
        super().__init__()
        assert attn.windows is not None
        self.norm1, self.attn = block.get_submodule("norm1"), attn
        self.norm2, self.mlp = block.get_submodule("norm2"), block.get_submodule("mlp")
        self.grid: Grid = attn.windows.plan.grid
        self.window: Grid = attn.windows.plan.window
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1:3] == self.grid, (x.shape, self.grid)
        x_BNC = x.flatten(1, 2)
        x_BNC = x_BNC + self.attn(self.norm1(x_BNC))
        x_BNC = x_BNC + self.mlp(self.norm2(x_BNC))
        out_BHWC: Tensor = x_BNC.unflatten(1, self.grid)
        return out_BHWC


def block_refusal(block: nn.Module) -> str:
    """Why the attention of a block can't be reduced, or nothing."""
    if isinstance(block, WindowBlock):
        return ""
    if type(block) is not SwinTransformerBlock:
        return f"block is {type(block).__name__}, expected timm's SwinTransformerBlock"
    if block.dynamic_mask:
        return "dynamic_img_size: its windows are those of each image's own size; build it for one size (img_size)"
    if type(block.attn) is not TimmWindowAttention:
        return f"attention is {type(block.attn).__name__}, expected timm's WindowAttention"
    return (
        "timm's block cuts its windows in front of the attention; a model that corp-deploy builds has them inside, as "
        "with_inner_windows of corp_deploy.families.timm_windows makes them"
    )


def _plan(block: SwinTransformerBlock) -> WindowPlan:
    height, width = to_2tuple(block.input_resolution)
    rows, columns = block.window_size
    down, right = block.shift_size
    return WindowPlan(grid=(height, width), window=(rows, columns), shift=(down, right))


def _made_whole(block: SwinTransformerBlock) -> WindowBlock:
    theirs, plan = block.attn, _plan(block)
    assert isinstance(theirs, TimmWindowAttention), theirs
    weight = theirs.qkv.weight
    layout = HeadLayout(heads=theirs.num_heads, width=len(weight) // (3 * theirs.num_heads))
    bias = TableBias(theirs.relative_position_bias_table, plan.relative())
    ours = head_attention(theirs, layout, position_bias=bias)
    ours.windows = Windows(plan)
    return WindowBlock(block, ours.to(weight.device), layout)


def with_inner_windows(model: nn.Module) -> nn.Module:
    """The model with its blocks of windows as layers of whole maps; itself where it has none, or of any image size."""
    blocks: dict[str, nn.Module] = {}
    for name, block in model.named_modules():
        if type(block) is SwinTransformerBlock and not block.dynamic_mask and type(block.attn) is TimmWindowAttention:
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
        of_attention = head_state(timms, block.layout)
        if TABLE in timms:
            of_attention["position_bias.table"] = timms[TABLE]
        ours = {key: value for key, value in ours.items() if not key.startswith(prefix)}
        ours |= {f"{prefix}{key}": value for key, value in of_attention.items()}
    return ours
