"""The training of two ViTs on the procedural images: one with many redundant channels, and one with none.

`PLAIN`: 6 blocks, 128 wide, 2 heads of 64; about 10 minutes on one idle CPU core.

`HARD`: 6 blocks, 40 wide, 40 hidden, 2 heads of 20, 16 patches. Its 72 classes are the 24 of the images at a short, a
middle and a long wavelength. The ranges of wavelengths touch, so many images lie near the edge of a class. Two terms in
addition to the cross entropy make the model hard to prune by any method: hidden channels, and dimensions of queries and
keys, have to carry equal energy and be uncorrelated.

With one thread, the weights depend only on the seed. A stopped training continues after its last whole epoch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.quality.procedural_images import CLASSES, IMAGE_SIZE, WAVELENGTHS, Labelled, made
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint, save

SEED, BANDS, DEPTH = 0, 3, 6
EVEN, UNCORRELATED = 0.1, 0.02


def labels_by_band(labelled: Labelled) -> NDArray[np.int64]:
    """Return class and band of the wavelength [N] as one number."""
    low, high = WAVELENGTHS
    bands = ((labelled.wavelengths - low) / (high - low) * BANDS).astype(np.int64)
    return labelled.labels * BANDS + np.minimum(bands, BANDS - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The settings of a training: `spares` penalises redundant channels, `half` multiplies in bfloat16."""

    width: int
    patch: int
    classes: int
    labels: Callable[[Labelled], NDArray[np.int64]]
    epochs: int
    batch: int
    rate: float
    decay: float = 0.0
    smoothing: float = 0.0
    mlp_ratio: float = 4.0
    half: bool = False
    spares: bool = False
    depth: int = DEPTH
    images: int = 16384

    @property
    def architecture(self) -> Architecture:
        return Architecture(
            name="vit_tiny_patch16_224",
            kwargs={
                "img_size": IMAGE_SIZE,
                "patch_size": self.patch,
                "embed_dim": self.width,
                "depth": self.depth,
                "num_heads": 2,
                **({} if self.mlp_ratio == 4.0 else {"mlp_ratio": self.mlp_ratio}),
                "num_classes": self.classes,
                "pretrained_cfg_overlay": {"crop_pct": 1.0},
            },
        )


PLAIN = Course(
    width=128, patch=8, classes=len(CLASSES), labels=lambda labelled: labelled.labels, epochs=7, batch=32, rate=1e-3,
    decay=0.05, smoothing=0.05, half=True,
)  # fmt: skip
HARD = Course(
    width=40, patch=16, classes=len(CLASSES) * BANDS, labels=labels_by_band, epochs=4, batch=64, rate=3e-3,
    mlp_ratio=1.0, spares=True,
)  # fmt: skip


def unevenness(carried: Tensor) -> Tensor:
    """Return the mean square of log(carried) [...,C] about its mean over C, 0 for equal channels."""
    logs = torch.log(carried + 1e-8)
    return (logs - logs.mean(-1, keepdim=True)).square().mean()


def correlation(values: Tensor) -> Tensor:
    """Return C times the mean squared correlation of two channels of values [G,M,C], M samples, mean over G."""
    centred = values - values.mean(1, keepdim=True)
    unit = centred / (centred.norm(dim=1, keepdim=True) + 1e-6)
    squares, channels = (unit.transpose(1, 2) @ unit).square(), values.shape[-1]
    alike: Tensor = (squares.sum((1, 2)) - channels).mean() / (channels * (channels - 1)) * channels
    return alike


class Spares:
    """Hooks that keep hidden channels [B,N,C], queries and keys [B,H,N,D] of a forward pass."""

    def __init__(self, model: nn.Module, depth: int) -> None:
        self.model, self.depth = model, depth
        self._seen: dict[str, Tensor] = {}
        for block in range(depth):
            for name in self._names(block):
                model.get_submodule(name).register_forward_hook(
                    lambda _, __, values, name=name: self._seen.__setitem__(name, values)
                )

    @staticmethod
    def _names(block: int) -> tuple[str, str, str]:
        return f"blocks.{block}.mlp.act", f"blocks.{block}.attn.q_norm", f"blocks.{block}.attn.k_norm"

    def penalty(self) -> Tensor:
        """Return the penalty of the last forward pass, mean over the blocks."""
        uneven, alike = torch.zeros(()), torch.zeros(())
        for block in range(self.depth):
            hidden, queries, keys = (self._seen[name] for name in self._names(block))
            outward = self.model.get_parameter(f"blocks.{block}.mlp.fc2.weight").square().sum(0)
            queries, keys = (each.transpose(0, 1).flatten(1, 2) for each in (queries, keys))
            uneven = uneven + unevenness(hidden.var((0, 1)) * outward) + unevenness(queries.var(1) * keys.var(1))
            alike = alike + correlation(hidden.flatten(0, 1)[None]) + correlation(queries) + correlation(keys)
        return (EVEN * uneven + UNCORRELATED * alike) / self.depth


def train(state: Path, course: Course) -> nn.Module:
    """Train by AdamW, one-cycle learning rate, gradient clipping, horizontal flips; `state` is written every epoch."""
    torch.manual_seed(SEED)
    model = dense_from_architecture(course.architecture)
    labelled = made("train", course.images)
    pixels, labels = torch.from_numpy(labelled.images), torch.from_numpy(course.labels(labelled))
    optimizer = torch.optim.AdamW(model.parameters(), lr=course.rate, weight_decay=course.decay)
    steps = course.epochs * (course.images // course.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=course.rate, total_steps=steps, pct_start=0.1)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    first = 0
    if state.is_file():
        held = torch.load(state, weights_only=True)
        first = held["epochs"]
        for name, part in parts.items():
            part.load_state_dict(held[name])
    spares = Spares(model.train(), course.depth) if course.spares else None
    for epoch in range(first, course.epochs):
        order = torch.randperm(course.images, generator=torch.Generator().manual_seed(epoch))
        losses = []
        for rows in order[: course.images // course.batch * course.batch].split(course.batch):
            batch = pixels[rows].flip(-1) if int(rows[0]) % 2 else pixels[rows]
            with torch.autocast("cpu", torch.bfloat16, enabled=course.half):
                logits = model(batch)
            loss = F.cross_entropy(logits.float(), labels[rows], label_smoothing=course.smoothing)
            optimizer.zero_grad()
            (loss if spares is None else loss + spares.penalty()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}/{course.epochs}  mean loss {np.mean(losses):.3f}", flush=True)
        torch.save({"epochs": epoch + 1, **{name: part.state_dict() for name, part in parts.items()}}, state)
    return model.eval()


def trained(directory: Path, course: Course) -> Checkpoint:
    """Return the model of a directory, trained and saved there first if there is none."""
    if (directory / "config.json").is_file():
        return load_checkpoint(directory)
    directory.mkdir(parents=True, exist_ok=True)
    train(directory / "training.pt", course)
    model = dense_from_architecture(course.architecture)  # without hooks
    model.load_state_dict(torch.load(directory / "training.pt", weights_only=True)["model"])
    lineage = {"trained_by": "benchmarks/quality/training.py", "seed": SEED}
    checkpoint = Checkpoint(model=model.eval(), architecture=course.architecture, lineage=lineage)
    save(checkpoint, directory)
    return checkpoint
