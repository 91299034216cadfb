"""Parameters and MACs of a vision transformer by formula. PURE.

One multiply-add counts once: the patch embedding, every linear layer, Q K' and A V. Biases, normalisations, softmax
and activations are not counted. A zero-padded head counts its padded width in Q K' and A V, because that is what the
engine multiplies.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Widths of one block: q/k and v per head, MLP hidden; `padded` when q/k and v are brought to one width inside the
    graph.
    """

    heads: int
    qk: int
    v: int
    padded: bool
    hidden: int

    def __post_init__(self) -> None:
        if min(self.heads, self.qk, self.v, self.hidden) < 1:
            raise ValueError(f"block widths must be at least 1, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VitShape:
    """A model's sizes: embedding width, patches, inputs per patch (channels * height * width), tokens, classes and its
    blocks.
    """

    dim: int
    patches: int
    patch_inputs: int
    tokens: int
    classes: int
    blocks: tuple[BlockShape, ...]


def mlp_macs(*, tokens: int, dim: int, hidden: int) -> int:
    """MACs of the two linear layers of one MLP for one image."""
    return 2 * tokens * dim * hidden


def attention_macs(*, tokens: int, dim: int, heads: int, qk: int, v: int, padded: bool) -> int:
    """MACs of one attention layer for one image: projections, Q K' and A V."""
    projections = tokens * dim * heads * (2 * qk + 2 * v)
    core_qk, core_v = (max(qk, v), max(qk, v)) if padded else (qk, v)
    return projections + heads * tokens * tokens * (core_qk + core_v)


def block_macs(shape: VitShape, block: BlockShape) -> int:
    """MACs of one block for one image."""
    attention = attention_macs(
        tokens=shape.tokens, dim=shape.dim, heads=block.heads, qk=block.qk, v=block.v, padded=block.padded
    )
    return attention + mlp_macs(tokens=shape.tokens, dim=shape.dim, hidden=block.hidden)


def macs(shape: VitShape) -> int:
    """MACs of the whole model for one image; the head sees one pooled token."""
    embedding = shape.patches * shape.patch_inputs * shape.dim
    return embedding + sum(block_macs(shape, block) for block in shape.blocks) + shape.dim * shape.classes


def mlp_parameters(*, dim: int, hidden: int) -> int:
    """Parameters of fc1 and fc2 with their biases."""
    return (dim + 1) * hidden + hidden * dim + dim


def attention_parameters(*, dim: int, heads: int, qk: int, v: int) -> int:
    """Parameters of qkv and proj with their biases."""
    return (dim + 1) * heads * (2 * qk + v) + heads * v * dim + dim
