"""Train the digits examples, timm's models both: fixed seed, a few minutes on two CPU cores.

    python -m corp_deploy.demo.digits.train --output examples/digits/model
    python -m corp_deploy.demo.digits.train --example resnet --output examples/digits/resnet

The weights in the repository came from this script; nothing else in the project trains.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from corp_deploy.families.timm_arguments import build_from_arguments
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import WEIGHTS, Checkpoint, dense_from_architecture, save
from corp_deploy.store.hub_snapshot import CONFIG
from ground.files import replacing, write_json

from .images import IMAGE_SIZE, MEAN, STD, load_part

SEED = 0
BATCH = 32
SHIFT = 3
CLASSES = 10
VIT = Architecture(
    name="vit_tiny_patch16_224",
    kwargs={
        "img_size": IMAGE_SIZE,
        "patch_size": 4,
        "embed_dim": 96,
        "depth": 6,
        "num_heads": 3,
        "num_classes": CLASSES,
        "pretrained_cfg_overlay": {"crop_pct": 1.0},
    },
)
RESNET = Architecture(
    name="resnet18d",
    kwargs={"layers": [2, 2, 1, 1], "channels": [48, 48, 64, 64], "stem_width": 32, "num_classes": CLASSES},
)


def _augmented(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Shift each image by up to SHIFT pixels, pad with background, and add a little noise."""
    padded = F.pad(images, (SHIFT, SHIFT, SHIFT, SHIFT), value=-MEAN / STD)
    shifts = torch.randint(0, 2 * SHIFT + 1, (len(images), 2), generator=generator).tolist()
    moved = torch.stack(
        [p[:, y : y + IMAGE_SIZE, x : x + IMAGE_SIZE] for p, (y, x) in zip(padded, shifts, strict=True)]
    )
    return moved + 0.05 * torch.randn(moved.shape, generator=generator)


def accuracy(model: nn.Module, part: str) -> float:
    """Return the share of images of `part` whose top-1 class is the label."""
    digits = load_part(part)
    with torch.inference_mode():
        logits = model.eval()(torch.from_numpy(digits.images))
    return float(np.mean(logits.argmax(1).numpy() == digits.labels))


def train(make: Callable[[], nn.Module], *, epochs: int, rate: float) -> nn.Module:
    """Train a new model on the part "train" by AdamW with a one-cycle learning rate, and return it."""
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    model = make()
    digits = load_part("train")
    images, labels = torch.from_numpy(digits.images), torch.from_numpy(digits.labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    steps = epochs * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps, pct_start=0.1)
    model.train()
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=generator)
        for rows in order[: len(order) // BATCH * BATCH].split(BATCH):
            loss = F.cross_entropy(model(_augmented(images[rows], generator)), labels[rows], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        click.echo(f"epoch {epoch + 1}/{epochs}  loss {loss.item():.3f}", err=True)
    return model


def _save_vit(model: nn.Module, reached: Mapping[str, float], directory: Path) -> None:
    lineage = {"trained_by": "examples/digits/train.py", "seed": SEED, "accuracy": dict(reached)}
    save(Checkpoint(model=model, architecture=VIT, lineage=lineage), directory)


def _save_snapshot(model: nn.Module, reached: Mapping[str, float], directory: Path) -> None:
    """Save a model as a snapshot of one of timm's repositories, with timm's names of weights."""
    kwargs: dict[str, Any] = dict(RESNET.kwargs)
    prepared = {"crop_pct": 1.0, "interpolation": "bicubic", "mean": [MEAN] * 3, "std": [STD] * 3}
    config = {
        "architecture": RESNET.name,
        "num_classes": kwargs.pop("num_classes"),
        "model_args": kwargs,
        "pretrained_cfg": {"input_size": [3, IMAGE_SIZE, IMAGE_SIZE], "fixed_input_size": True, **prepared},
        "trained_by": "examples/digits/train.py",
        "seed": SEED,
        "accuracy": dict(reached),
    }
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    with replacing(directory / WEIGHTS) as temporary:
        save_file(state, temporary, metadata={"format": "pt"})
    write_json(directory / CONFIG, config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The training of an example: its model, epochs and learning rate, and how it is saved."""

    make: Callable[[], nn.Module]
    epochs: int
    rate: float
    save: Callable[[nn.Module, Mapping[str, float], Path], None]


EXAMPLES: Mapping[str, Training] = {
    "vit": Training(make=lambda: dense_from_architecture(VIT), epochs=50, rate=1e-3, save=_save_vit),
    "resnet": Training(
        make=lambda: build_from_arguments(RESNET.name, dict(RESNET.kwargs)), epochs=20, rate=2e-3, save=_save_snapshot
    ),
}


@click.command()
@click.option("--example", type=click.Choice(list(EXAMPLES)), default="vit", show_default=True, help="Which model.")
@click.option(
    "--output", type=click.Path(path_type=Path), required=True, help="Directory for the weights and config.json."
)
def main(example: str, output: Path) -> None:
    """Train, report held-out accuracy, and save the weights with what is needed to rebuild the model."""
    training = EXAMPLES[example]
    model = train(training.make, epochs=training.epochs, rate=training.rate)
    reached = {part: accuracy(model, part) for part in ("train", "held-out")}
    training.save(model, reached, output)
    click.echo(f"accuracy: train {reached['train']:.4f}, held-out {reached['held-out']:.4f}")


if __name__ == "__main__":
    main()
