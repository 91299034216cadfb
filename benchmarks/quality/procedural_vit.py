"""Train the ViT of the procedural images: 6 blocks, 128 wide, 2 heads of 64; about 10 minutes on one idle CPU core.

    python -m benchmarks.quality.procedural_vit --output build/methods/procedural

A training that was stopped goes on from its last whole epoch.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.quality.procedural_images import CLASSES, IMAGE_SIZE, made
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, save

SEED = 0
TRAIN_IMAGES, HELD_OUT_IMAGES = 16384, 1000
EPOCHS, BATCH, LEARNING_RATE = 7, 32, 1e-3
ARCHITECTURE = Architecture(
    name="vit_tiny_patch16_224",
    kwargs={
        "img_size": IMAGE_SIZE,
        "patch_size": 8,
        "embed_dim": 128,
        "depth": 6,
        "num_heads": 2,
        "num_classes": len(CLASSES),
        "pretrained_cfg_overlay": {"crop_pct": 1.0},
    },
)


def accuracy(model: nn.Module, count: int) -> float:
    """Share of the first held-out images whose top-1 class is the label."""
    held_out = made("held-out", count)
    with torch.inference_mode():
        pieces = torch.from_numpy(held_out.images).split(50)
        answers = torch.cat([model.eval()(piece).argmax(1) for piece in pieces])
    return float(np.mean(answers.numpy() == held_out.labels))


def train(state: Path, *, images: int = TRAIN_IMAGES, epochs: int = EPOCHS) -> nn.Module:
    """AdamW, one-cycle learning rate, label smoothing, gradient clipping, bfloat16 products, horizontal flips.

    `state` holds what an interrupted training needs; it is written after every epoch.
    """
    torch.manual_seed(SEED)
    model = dense_from_architecture(ARCHITECTURE)
    made_train = made("train", images)
    pixels, labels = torch.from_numpy(made_train.images), torch.from_numpy(made_train.labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    steps = epochs * (images // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps, pct_start=0.1)
    first = 0
    if state.is_file():
        held = torch.load(state, weights_only=True)
        first = held["epochs"]
        model.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])
        schedule.load_state_dict(held["schedule"])
    model.train()
    for epoch in range(first, epochs):
        order = torch.randperm(images, generator=torch.Generator().manual_seed(epoch))
        losses = []
        for rows in order[: images // BATCH * BATCH].split(BATCH):
            batch = pixels[rows].flip(-1) if int(rows[0]) % 2 else pixels[rows]
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(batch)
            loss = F.cross_entropy(logits.float(), labels[rows], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}/{epochs}  mean loss {np.mean(losses):.3f}", flush=True)
        whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save({"epochs": epoch + 1, **whole}, state)
    return model.eval()


def trained(directory: Path) -> Checkpoint:
    """Train and save the model with what is needed to rebuild it."""
    directory.mkdir(parents=True, exist_ok=True)
    model = train(directory / "training.pt")
    lineage = {
        "trained_by": "benchmarks/quality/procedural_vit.py",
        "seed": SEED,
        "accuracy": {"held-out": accuracy(model, HELD_OUT_IMAGES)},
    }
    checkpoint = Checkpoint(model=model, architecture=ARCHITECTURE, lineage=lineage)
    save(checkpoint, directory)
    return checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(trained(arguments.output).lineage)


if __name__ == "__main__":
    main()
