"""Train the digits example: a 6-block timm ViT, fixed seed, a few minutes on two CPU cores.

    python -m corp_deploy.demo.digits.train --output examples/digits/model

The weights in the repository came from this script; nothing else in the project trains.
"""

from pathlib import Path

import click
import numpy as np
import torch
from torch.nn import functional as F

from corp_deploy.families.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, save

from .images import IMAGE_SIZE, MEAN, STD, load

SEED = 0
EPOCHS = 50
BATCH = 32
SHIFT = 3
ARCHITECTURE = Architecture(
    name="vit_tiny_patch16_224",
    kwargs={
        "img_size": IMAGE_SIZE,
        "patch_size": 4,
        "embed_dim": 96,
        "depth": 6,
        "num_heads": 3,
        "num_classes": 10,
        "pretrained_cfg_overlay": {"crop_pct": 1.0},
    },
)


def _augmented(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Shift each image by up to SHIFT pixels, pad with background, and add a little noise."""
    padded = F.pad(images, (SHIFT, SHIFT, SHIFT, SHIFT), value=-MEAN / STD)
    shifts = torch.randint(0, 2 * SHIFT + 1, (len(images), 2), generator=generator).tolist()
    moved = torch.stack(
        [p[:, y : y + IMAGE_SIZE, x : x + IMAGE_SIZE] for p, (y, x) in zip(padded, shifts, strict=True)]
    )
    return moved + 0.05 * torch.randn(moved.shape, generator=generator)


def accuracy(model: torch.nn.Module, part: str) -> float:
    """Share of images of `part` whose top-1 class is the label."""
    digits = load(part)
    with torch.inference_mode():
        logits = model.eval()(torch.from_numpy(digits.images))
    return float(np.mean(logits.argmax(1).numpy() == digits.labels))


def train() -> torch.nn.Module:
    """AdamW, one-cycle learning rate, label smoothing, gradient clipping; returns the trained model."""
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    model = dense_from_architecture(ARCHITECTURE)
    digits = load("train")
    images, labels = torch.from_numpy(digits.images), torch.from_numpy(digits.labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    steps = EPOCHS * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=steps, pct_start=0.1)
    model.train()
    for epoch in range(EPOCHS):
        order = torch.randperm(len(images), generator=generator)
        for rows in order[: len(order) // BATCH * BATCH].split(BATCH):
            loss = F.cross_entropy(model(_augmented(images[rows], generator)), labels[rows], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        click.echo(f"epoch {epoch + 1}/{EPOCHS}  loss {loss.item():.3f}", err=True)
    return model


@click.command()
@click.option(
    "--output", type=click.Path(path_type=Path), required=True, help="Directory for the weights and config.json."
)
def main(output: Path) -> None:
    """Train, report held-out accuracy, and save the weights with what is needed to rebuild the model."""
    model = train()
    reached = {part: accuracy(model, part) for part in ("train", "held-out")}
    lineage = {"trained_by": "examples/digits/train.py", "seed": SEED, "accuracy": reached}
    save(Checkpoint(model=model, architecture=ARCHITECTURE, lineage=lineage), output)
    click.echo(f"accuracy: train {reached['train']:.4f}, held-out {reached['held-out']:.4f}")


if __name__ == "__main__":
    main()
