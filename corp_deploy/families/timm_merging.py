"""Token merging in timm's VisionTransformer: a copy whose blocks merge, and the merging of such a copy."""

import copy

from timm.models.vision_transformer import Block as TimmBlock
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ground.errors import BadInput

from .head_attention import Beside, HeadAttention
from .merging import Merging, tokens_after
from .named_outputs import NamedOutputs
from .named_outputs import merging_refusal as merging_refusal_beside
from .timm_blocks import MergingBlock, MergingBlocks, plain_block
from .timm_sites import comes_apart, sites
from .token_merging import TokenMerge, unmerged
from .widths import is_empty


def merging_of(vit: VisionTransformer) -> Merging | None:
    """None for a model that merges nothing."""
    blocks: nn.Module = vit.blocks
    return blocks.merging if isinstance(blocks, MergingBlocks) else None


def merging_refusal(vit: VisionTransformer) -> str:
    """Why tokens can't be merged here, or nothing: every attention must take sizes, every block come apart."""
    offered = sites(vit)
    heads = {site.name for site in offered.heads}
    for index, block in enumerate(vit.blocks):
        refusals = [refusal for refusal in offered.refused if f"blocks.{index}.attn" in refusal.sites]
        if refusals:
            return f"{refusals[0].name}: {refusals[0].reason}"
        if f"blocks.{index}.attn" not in heads or not isinstance(block, TimmBlock | MergingBlock):
            return f"blocks.{index} is {type(block).__name__}, expected timm's pre-norm Block"
        if not comes_apart(block):
            return f"blocks.{index} scales its branches by {type(block.ls1).__name__}, expected timm's LayerScale"
    return ""


def _reads_patches(vit: VisionTransformer) -> bool:
    """Whether the pooling reads patch tokens, which stand unmerged before it."""
    return vit.attn_pool is not None or vit.global_pool in ("avg", "avgmax", "max")


def _attentions(vit: VisionTransformer) -> list[HeadAttention]:
    """Every attention as one that takes sizes, with the model's own parameters."""
    attentions = []
    for site in sites(vit).heads:
        attention = site.empty(qk=site.qk, v=site.v, geometry=site.geometry)
        attention.load_state_dict(site.module.state_dict(), assign=True)
        attentions.append(attention)
    return attentions


def _merge(merging: Merging, index: int, protected: int) -> TokenMerge | None:
    count = merging.schedule[index]
    if not count:
        return None
    return TokenMerge(count=count, protected=protected, how=merging.how, metric=merging.metric)


def _refuse_misfit(vit: VisionTransformer, merging: Merging) -> None:
    if len(merging.schedule) != len(vit.blocks):
        raise BadInput(
            f"merging: a schedule of {len(merging.schedule)} entries for {len(vit.blocks)} blocks; give one a block"
        )
    if merging.how == "drop" and not vit.has_class_token:
        raise BadInput("merging: drop keeps what the class token attends to, and the model has none; merge instead")
    if isinstance(vit, NamedOutputs) and (reason := merging_refusal_beside(merging.how, vit.named_outputs)):
        raise BadInput(f"merging: {reason}")
    if merging.compares_attention and (empty := [site.name for site in sites(vit).heads if is_empty(site.width)]):
        raise BadInput(
            f"merging: tokens are compared by what attentions tell, and {', '.join(empty)} is a constant; compare them "
            "by ward, which looks at the stream"
        )
    tokens_after(merging, vit.num_prefix_tokens + vit.patch_embed.num_patches, vit.num_prefix_tokens)


def with_merging(vit: VisionTransformer, merging: Merging | None) -> nn.Module:
    """A copy in eval mode that merges so, or not at all; the model given is left as it is.

    Raises BadInput for a model that can't, and for a schedule that doesn't fit it.
    """
    if merging is None and merging_of(vit) is None:
        return copy.deepcopy(vit).eval()
    if refusal := merging_refusal(vit):
        raise BadInput(f"token merging: {refusal}; leave --merge-tokens away")
    copied = copy.deepcopy(vit)
    if merging is None:
        blocks: nn.Module = nn.Sequential(*map(plain_block, copied.blocks))
    else:
        _refuse_misfit(vit, merging)
        beside: Beside | None = "attention" if merging.how == "drop" else "keys" if merging.metric == "keys" else None
        blocks = MergingBlocks(
            [
                MergingBlock(block, attention, _merge(merging, index, vit.num_prefix_tokens), beside)
                for index, (block, attention) in enumerate(zip(copied.blocks, _attentions(copied), strict=True))
            ],
            merging=merging,
            unmerges=merging.how == "merge" and (merging.unmerged or _reads_patches(vit)),
        )
    copied.add_module("blocks", blocks)
    return copied.eval()


def unmerged_for_head(vit: VisionTransformer, x_BNC: Tensor, sources_BM: Tensor | None) -> Tensor:
    """The last stream as what reads it takes it: unmerged where the model does that."""
    blocks: nn.Module = vit.blocks
    if not isinstance(blocks, MergingBlocks) or not blocks.unmerges or sources_BM is None:
        return x_BNC
    return unmerged(x_BNC, sources_BM)
