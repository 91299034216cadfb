"""Train a narrow ViT in which no channel is to spare: 6 blocks, 40 wide, 40 hidden, 2 heads of 20, 16 patches.

    python -m benchmarks.quality.hard_training --output build/methods/hard

Its 72 classes are the 24 of the procedural images in a short, a middle and a long wavelength, which are neighbours
without a gap, so that many images lie near an edge. Two terms beside the cross entropy make it hard to prune, with no
look at any way of pruning it: what each hidden channel, and each dimension of queries and keys, carries is to be
equal, and they are to be uncorrelated. No weight decay, dropout or label smoothing.

It follows from its seed with one thread; a training that was stopped goes on from its last whole epoch.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from benchmarks.quality.procedural_images import CLASSES, IMAGE_SIZE, WAVELENGTHS, Labelled, made
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, save

SEED, BANDS, DEPTH = 0, 3, 6
TRAIN_IMAGES, EPOCHS, BATCH, LEARNING_RATE = 16384, 4, 64, 3e-3
EVEN, UNCORRELATED = 0.1, 0.02
ARCHITECTURE = Architecture(
    name="vit_tiny_patch16_224",
    kwargs={
        "img_size": IMAGE_SIZE,
        "patch_size": 16,
        "embed_dim": 40,
        "depth": DEPTH,
        "num_heads": 2,
        "mlp_ratio": 1.0,
        "num_classes": len(CLASSES) * BANDS,
        "pretrained_cfg_overlay": {"crop_pct": 1.0},
    },
)


def labels_by_band(labelled: Labelled) -> NDArray[np.int64]:
    """Class and band of the wavelength [N] as one number."""
    low, high = WAVELENGTHS
    bands = ((labelled.wavelengths - low) / (high - low) * BANDS).astype(np.int64)
    return labelled.labels * BANDS + np.minimum(bands, BANDS - 1)


def unevenness(carried: Tensor) -> Tensor:
    """Mean square of log(carried) [...,C] about its mean over C: 0 where all channels carry the same."""
    logs = torch.log(carried + 1e-8)
    return (logs - logs.mean(-1, keepdim=True)).square().mean()


def correlation(values: Tensor) -> Tensor:
    """Of values [G,M,C], M samples: the mean squared correlation of two channels, times C, mean over G."""
    centred = values - values.mean(1, keepdim=True)
    unit = centred / (centred.norm(dim=1, keepdim=True) + 1e-6)
    squares, channels = (unit.transpose(1, 2) @ unit).square(), values.shape[-1]
    alike: Tensor = (squares.sum((1, 2)) - channels).mean() / (channels * (channels - 1)) * channels
    return alike


class Spares:
    """What a forward pass had to spare in hidden channels [B,N,C] and in queries and keys [B,H,N,D]."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._seen: dict[str, Tensor] = {}
        self._handles = [self._watched(name) for block in range(DEPTH) for name in self._names(block)]

    @staticmethod
    def _names(block: int) -> tuple[str, str, str]:
        return f"blocks.{block}.mlp.act", f"blocks.{block}.attn.q_norm", f"blocks.{block}.attn.k_norm"

    def _watched(self, name: str) -> RemovableHandle:
        def keep(_: nn.Module, __: object, values: Tensor) -> None:
            self._seen[name] = values

        return self.model.get_submodule(name).register_forward_hook(keep)

    def penalty(self) -> Tensor:
        """Of the last forward pass, mean over the blocks."""
        uneven, alike = torch.zeros(()), torch.zeros(())
        for block in range(DEPTH):
            hidden, queries, keys = (self._seen[name] for name in self._names(block))
            outward = self.model.get_parameter(f"blocks.{block}.mlp.fc2.weight").square().sum(0)
            queries, keys = (each.transpose(0, 1).flatten(1, 2) for each in (queries, keys))
            uneven = uneven + unevenness(hidden.var((0, 1)) * outward) + unevenness(queries.var(1) * keys.var(1))
            alike = alike + correlation(hidden.flatten(0, 1)[None]) + correlation(queries) + correlation(keys)
        return (EVEN * uneven + UNCORRELATED * alike) / DEPTH

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def train(state: Path, *, images: int = TRAIN_IMAGES, epochs: int = EPOCHS) -> nn.Module:
    """Adam, one-cycle learning rate, gradient clipping, horizontal flips, float32. `state` is written every epoch."""
    torch.manual_seed(SEED)
    model = dense_from_architecture(ARCHITECTURE)
    labelled = made("train", images)
    pixels, labels = torch.from_numpy(labelled.images), torch.from_numpy(labels_by_band(labelled))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    steps = epochs * (images // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps, pct_start=0.1)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    first = 0
    if state.is_file():
        held = torch.load(state, weights_only=True)
        first = held["epochs"]
        for name, part in parts.items():
            part.load_state_dict(held[name])
    spares = Spares(model.train())
    for epoch in range(first, epochs):
        order = torch.randperm(images, generator=torch.Generator().manual_seed(epoch))
        losses = []
        for rows in order[: images // BATCH * BATCH].split(BATCH):
            batch = pixels[rows].flip(-1) if int(rows[0]) % 2 else pixels[rows]
            loss = F.cross_entropy(model(batch), labels[rows])
            optimizer.zero_grad()
            (loss + spares.penalty()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}/{epochs}  mean loss {np.mean(losses):.3f}", flush=True)
        torch.save({"epochs": epoch + 1, **{name: part.state_dict() for name, part in parts.items()}}, state)
    spares.remove()
    return model.eval()


def trained(directory: Path, *, images: int = TRAIN_IMAGES, epochs: int = EPOCHS) -> Checkpoint:
    """Train and save the model with what is needed to rebuild it."""
    directory.mkdir(parents=True, exist_ok=True)
    model = train(directory / "training.pt", images=images, epochs=epochs)
    lineage = {"trained_by": "benchmarks/quality/hard_training.py", "seed": SEED}
    checkpoint = Checkpoint(model=model, architecture=ARCHITECTURE, lineage=lineage)
    save(checkpoint, directory)
    return checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    torch.set_num_threads(1)
    trained(parser.parse_args().output)


if __name__ == "__main__":
    main()
