"""timm's pre-norm blocks with token merging between attention and MLP; parameters go by the same names as without.

Legend: B images, N tokens, C channels.
"""

from collections.abc import Iterator

from timm.models.vision_transformer import Block as TimmBlock
from torch import Tensor, nn

from .head_attention import Beside, HeadAttention
from .merging import Merging
from .token_merging import TokenMerge, Tokens, sources_of, unmerged

PARTS = ("norm1", "attn", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2")


class MergingBlock(nn.Module):
    """x + ls1(attn(norm1(x))), tokens merged, x + ls2(mlp(norm2(x))): timm's Block in evaluation.

    `beside`: what of the attention tokens are compared by; None: the stream. Without `merge` nothing
    is merged here.
    """

    def __init__(self, block: nn.Module, attn: HeadAttention, merge: TokenMerge | None, beside: Beside | None) -> None:
        """`block` is timm's, or one that merges."""
        super().__init__()
        self.norm1, self.attn, self.ls1, self.drop_path1, self.norm2, self.mlp, self.ls2, self.drop_path2 = (
            attn if name == "attn" else block.get_submodule(name) for name in PARTS
        )
        self.merge = merge
        self.beside: Beside | None = beside if merge is not None else None

    def forward(
        self, x: Tensor, sizes: Tensor | None, sources: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The stream, its sizes and its sources, as Tokens are."""
        entering, compared = self.norm1(x), None
        if self.beside is None:
            out = self.attn(entering, sizes)
        else:
            out, compared = self.attn(entering, sizes, beside=self.beside)
        x = x + self.ls1(out)
        if self.merge is not None:
            x, sizes, sources = self.merge(x, sizes, sources, x if compared is None else compared)
        return x + self.ls2(self.mlp(self.norm2(x))), sizes, sources


def plain_block(merging: nn.Module) -> nn.Module:
    """timm's block with the parts of one that merges."""
    block = TimmBlock.__new__(TimmBlock)
    nn.Module.__init__(block)
    for name in PARTS:
        block.add_module(name, merging.get_submodule(name))
    return block


class MergingBlocks(nn.Module):
    """Blocks by number, as timm's model runs them: [B,N,C] -> the last stream, or one of all source tokens."""

    def __init__(self, blocks: list[MergingBlock], *, merging: Merging, unmerges: bool) -> None:
        """`unmerges`: whether what reads the last stream reads it token by token, or dense outputs are asked for."""
        super().__init__()
        self.merging = merging
        for index, block in enumerate(blocks):
            self.add_module(str(index), block)
        self.end = nn.Identity()
        self.depth, self.unmerges = len(blocks), unmerges

    def __len__(self) -> int:
        return self.depth

    def __getitem__(self, index: int) -> nn.Module:
        return self.get_submodule(str(range(self.depth)[index]))

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[index] for index in range(self.depth))

    def merged(self, x: Tensor) -> Tokens:
        """The last stream with its sizes and, where it is unmerged, its sources."""
        tokens = Tokens(x, None, sources_of(x) if self.unmerges else None)
        for block in self:
            tokens = Tokens(*block(*tokens))
        return Tokens(self.end(tokens.x), tokens.sizes, tokens.sources)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.merged(x)
        return tokens.x if tokens.sources is None else unmerged(tokens.x, tokens.sources)
