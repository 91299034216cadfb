"""A text encoder small enough for tests: token ids and a mask go in, an embedding comes out."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from export.graph.to_onnx import onnx_from_model, save_onnx
from ground.ports import OutputPort, Port

WORDS, TOKENS, DIM, CHANNELS = 50, 6, 16, 8
INPUTS = tuple(Port(name=name, shape=(TOKENS,), dtype="int64") for name in ("input_ids", "attention_mask"))
EMBEDDING = OutputPort(name="embedding", role="embedding")
TOKEN_LOGITS = OutputPort(name="words", role="token logits")


class TextEncoder(nn.Module):
    """ids [B,N], mask [B,N] -> the mean of the tokens that the mask keeps [B,C], and words [B,N,V] when asked for."""

    def __init__(self, *, words: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, DIM)
        self.qkv, self.norm = nn.Linear(DIM, 3 * DIM), nn.LayerNorm(DIM)
        self.proj = nn.Linear(DIM, CHANNELS)
        self.classify = nn.Linear(DIM, WORDS) if words else None
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.words(input_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1) / 4).masked_fill(attention_mask[:, None] == 0, -1e4)
        x = self.norm(x + scores.softmax(-1) @ v)
        kept = attention_mask[..., None].to(x.dtype)
        embedding: Tensor = self.proj((x * kept).sum(1) / kept.sum(1))
        return embedding if self.classify is None else (embedding, self.classify(x))


def sentences(count: int, seed: int = 0) -> dict[str, NDArray[np.int64]]:
    """Random ids of different lengths, the rest padded and masked."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, WORDS, (count, TOKENS))
    mask = (np.arange(TOKENS) < rng.integers(1, TOKENS + 1, (count, 1))).astype(np.int64)
    return {"input_ids": ids * mask, "attention_mask": mask}


def in_torch(model: nn.Module, feed: dict[str, NDArray[np.int64]]) -> list[NDArray[np.float64]]:
    """What the model says in float64, as a list of its outputs."""
    with torch.no_grad():
        answer = model.double()(*(torch.from_numpy(array) for array in feed.values()))
    model.float()
    return [tensor.numpy() for tensor in (answer if isinstance(answer, tuple) else (answer,))]


def write_text_onnx(path: Path, precision: str = "fp32", batch: int | None = None) -> Path:
    """The encoder's graph."""
    proto = onnx_from_model(TextEncoder(), INPUTS, [EMBEDDING], precision=precision, batch=batch, metadata={})
    save_onnx(proto, path)
    return path
