"""timm's Cait with blocks whose talking heads are those of HeadAttention."""

from collections.abc import Mapping

from timm.models.cait import Cait, LayerScaleBlock, TalkingHeadAttn
from torch import Tensor, nn

from .modules import replaced
from .talking_heads import TalkingHeads
from .timm_placed import HeadLayout, PlacedBlock, head_attention, placed_blocks
from .timm_placed import own_state as of_placed_blocks

_TALK = {"proj_l": "talk.before", "proj_w": "talk.behind"}


def _placed(block: LayerScaleBlock) -> PlacedBlock:
    theirs = block.attn
    assert isinstance(theirs, TalkingHeadAttn), theirs
    width = theirs.qkv.in_features // theirs.num_heads
    layout = HeadLayout(heads=theirs.num_heads, width=width)
    ours = head_attention(theirs, layout)
    ours.talk = TalkingHeads(theirs.proj_l, theirs.proj_w)
    return PlacedBlock(block, ours, (block.gamma_1, block.gamma_2), behind=False, layout=layout)


def placed(cait: Cait) -> nn.Module:
    """The model with its own weights; blocks of another kind stay."""
    blocks: dict[str, nn.Module] = {}
    for index, block in enumerate(cait.blocks):
        if type(block) is LayerScaleBlock and type(block.attn) is TalkingHeadAttn:
            blocks[f"blocks.{index}"] = _placed(block)
    return replaced(cait, blocks)


def own_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state under timm's names as that of a model with placed blocks."""
    ours = of_placed_blocks(model, state)
    for name, _ in placed_blocks(model):
        for theirs, own in _TALK.items():
            for part in ("weight", "bias"):
                if f"{name}.attn.{theirs}.{part}" in state:
                    ours[f"{name}.attn.{own}.{part}"] = state[f"{name}.attn.{theirs}.{part}"]
    return ours
