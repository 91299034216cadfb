"""A text encoder of one block, its sites, and a tokenizer of letters: as calib sees models without images."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from calib.sites import ChannelTaps, HeadTaps, Site, Tap

HEADS, DIM, WIDTH, HIDDEN, LETTERS = 2, 6, 12, 40, 128


def heads(x: Tensor) -> Tensor:
    split: Tensor = x.unflatten(2, (HEADS, DIM))
    return split.transpose(1, 2)


class TinyEncoder(nn.Module):
    """input_ids and attention_mask [B,N] int64 -> [B,3]; keys carry a constant part, as trained ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(64, WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.pooled, self.classes = nn.Linear(WIDTH, 10), nn.Linear(10, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        places_N = torch.arange(input_ids.shape[1], device=input_ids.device)
        x: Tensor = self.letters(input_ids) + self.places(places_N)
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        hidden_B11N = (attention_mask == 0)[:, None, None]
        z = (q @ k.mT).masked_fill(hidden_B11N, float("-inf")).softmax(-1) @ v
        x = x + self.out(z.transpose(1, 2).flatten(2))
        x = x + self.fc2(nn.functional.gelu(self.fc1(x)))
        mask_BN1 = attention_mask[..., None].to(x.dtype)
        mean = (x * mask_BN1).sum(1) / mask_BN1.sum(1)
        out: Tensor = self.classes(self.pooled(mean).relu())
        return out


def model() -> TinyEncoder:
    torch.manual_seed(0)
    encoder = TinyEncoder().eval()
    with torch.no_grad():
        encoder.k.bias.add_(10.0)
    return encoder


def sites_of(encoder: TinyEncoder) -> list[Site]:
    queries, keys = Tap(module=encoder.q, take=heads), Tap(module=encoder.k, take=heads)
    return [
        HeadTaps(name="attn", queries=queries, keys=keys, output=encoder.out),
        ChannelTaps(name="mlp", output=encoder.fc2),
        ChannelTaps(name="head", output=encoder.classes),
    ]


def encode_to(length: int) -> Callable[[Sequence[str]], Mapping[str, Tensor]]:
    """Letters as their codes, cut or padded to `length`; what pads is no 0, so that it would be seen."""

    def encode(documents: Sequence[str]) -> Mapping[str, Tensor]:
        rows = [[ord(letter) % LETTERS for letter in document[:length]] for document in documents]
        ids = torch.tensor([row + [77] * (length - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": mask}

    return encode
