"""A ViT-S trained on procedural images that are made as they are needed, none twice, until it is right often enough.

Time-boxed: the learning rate follows the share of the time that is spent. Training ends at the first check that reaches
the target, which leaves a model that still errs, as real ones do.
"""

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu import images as pictures
from benchmarks.gpu.setting import TINY, Setting
from benchmarks.quality.procedural_images import CLASSES
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from perf.stats.decision import wilson

LEARNING_RATE, WARM_UP_SHARE = 1e-3, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How long to train, to what accuracy on `check_images` looked at every `check_every` steps."""

    limit_s: float
    target: float
    batch: int
    check_every: int
    check_images: int
    held_out_images: int


def course(setting: Setting) -> Course:
    if setting.small:
        return Course(limit_s=1.0, target=0.5, batch=24, check_every=4, check_images=24, held_out_images=48)
    return Course(limit_s=60.0, target=0.95, batch=240, check_every=100, check_images=960, held_out_images=2000)


def architecture(setting: Setting) -> Architecture:
    kwargs: dict[str, Any] = {"num_classes": len(CLASSES), "pretrained_cfg_overlay": {"crop_pct": 1.0}}
    return Architecture(name="vit_small_patch16_224", kwargs=kwargs | (TINY if setting.small else {}))


def logits_of(model: nn.Module, images: Tensor, pieces: int = 250) -> Tensor:
    """In float32 throughout, [B, classes]."""
    with torch.inference_mode():
        return torch.cat([model(piece) for piece in images.split(pieces)])


def hits(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    return int((logits_of(model, images).argmax(1) == labels).sum())


def _rate(spent: float) -> float:
    """A short rise, then half a cosine down to a tenth."""
    if spent < WARM_UP_SHARE:
        return LEARNING_RATE * spent / WARM_UP_SHARE
    return LEARNING_RATE * (0.55 + 0.45 * math.cos(math.pi * min(spent, 1.0)))


def _spent(begun_s: float, plan: Course) -> float:
    return (time.monotonic() - begun_s) / plan.limit_s


def trained(setting: Setting) -> Checkpoint:
    """The model on the CPU, with how it was trained and how often it is right on held-out images in its lineage."""
    plan, device, size = course(setting), setting.device, setting.image_size
    torch.manual_seed(0)
    model = dense_from_architecture(architecture(setting)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.05, fused=device == "cuda")
    checks = pictures.labelled("check", plan.check_images, size=size, device=device)
    begun_s, steps, found, last = time.monotonic(), 0, 0.0, math.nan
    # As far as the first check in any case: without one there is neither a loss nor an accuracy to tell.
    while steps < plan.check_every or (_spent(begun_s, plan) < 1.0 and found < plan.target):
        for group in optimizer.param_groups:
            group["lr"] = _rate(_spent(begun_s, plan))
        images, labels = pictures.batch("train", steps, plan.batch, size=size, device=device)
        loss = _step(model.train(), optimizer, images, labels)
        steps += 1
        if steps % plan.check_every == 0:  # the one place where the host waits
            last, found = float(loss), hits(model.eval(), *checks) / plan.check_images
            if not math.isfinite(last):
                raise FloatingPointError(f"the loss is {last} after {steps} steps")
    seconds = time.monotonic() - begun_s
    held_out = pictures.labelled("held-out", plan.held_out_images, size=size, device=device)
    right = hits(model.eval(), *held_out)
    low, high = wilson(right, plan.held_out_images)
    lineage = {
        "trained_by": "benchmarks/gpu/training.py",
        "steps": steps,
        "images": steps * plan.batch,
        "seconds": seconds,
        "loss": last,
        "check_accuracy": found,
        "held_out_images": plan.held_out_images,
        "accuracy": right / plan.held_out_images,
        "accuracy_interval": [low, high],
    }
    model = model.cpu().requires_grad_(False)
    return Checkpoint(model=model, architecture=architecture(setting), lineage=lineage)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast(images.device.type, torch.bfloat16):
        logits = model(images)
    loss = F.cross_entropy(logits.float(), labels, label_smoothing=0.05)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()
