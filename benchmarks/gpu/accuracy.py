"""What reductions do to a ViT-S trained here on 224x224 images: presets, sparsities, closed loop, calibration sizes.

Accuracy is on held-out images, agreement and relative logit error are against the dense model on the same. The trained
weights are kept in the cache. Without them the part begins anew: rows of two models are never mixed.

Reductions are tried on the GPU (torch's default device set to it around them) and, where corp_deploy fails there, made
on the CPU; the row says where, and why not on the GPU. The closed loop on a CPU walks fewer images; an open loop on as
many stands beside it.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from benchmarks.gpu import images as pictures
from benchmarks.gpu import models, training
from benchmarks.gpu.record import NotYet, Record, Row, Task
from benchmarks.gpu.setting import ALIGN_HEAD, Setting
from benchmarks.gpu.workshop import Loop, Workshop, models_copy
from calib.images import open_images
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import polished
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.store.inputs import model_digest

JOINT, MLP_ONLY = ("best", "corp", "corp-v1", "none"), ("grail", "vbp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is swept; `images` calibrate an open loop, `cpu_loop_images` a closed one on a CPU; seconds of a polish."""

    presets: tuple[str, ...]
    sparsities: tuple[float, ...]
    seeds: tuple[int, ...]
    images: int
    cpu_loop_images: int
    polish_s: float
    curve: tuple[int, ...]


def sizes(setting: Setting) -> Sizes:
    if setting.small:
        return Sizes(
            presets=("best", "corp"),
            sparsities=(0.5,),
            seeds=(0, 1),
            images=16,
            cpu_loop_images=8,
            polish_s=0.2,
            curve=(8, 16),
        )
    return Sizes(
        presets=(*JOINT, *MLP_ONLY) if setting.everything else JOINT,
        sparsities=(0.5, 0.3, 0.7),
        seeds=(0, 1),
        images=2000,
        cpu_loop_images=64,
        polish_s=30.0,
        curve=(100, 250, 500, 1000, 2000, 4000),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One reduction."""

    preset: str
    sparsity: float
    seed: int
    images: int
    loop: Loop = "open"

    @property
    def key(self) -> str:
        return f"{self.preset} {self.loop} loop {self.sparsity:.0%} seed {self.seed} images {self.images}"

    def method(self, setting: Setting) -> Method:
        return method_from_preset(
            self.preset,
            mlp_sparsity=self.sparsity,
            attention_sparsity=self.sparsity,
            align_hidden=setting.align_hidden,
            align_head=ALIGN_HEAD,
        )


def open_loop(case: Case, shop: Workshop) -> Row:
    """The row of one reduction from the dense model's moments."""
    from corp_deploy.reduction.model import reduce

    method = case.method(shop.setting)
    calibrated = shop.calibrated(case.seed, case.images)

    def on(where: str) -> nn.Module:
        model, known = models_copy(shop.model(), where), None
        if method.mlp_selection == "obs":
            known = calibrated.eliminations_on(where, model, method)
        return reduce(model, calibrated.moments, method, eliminations=known).model

    reduced, told = shop.somewhere("open", on)
    return facts_of(case, reduced) | told | shop.judged(reduced)


def closed_loop(case: Case, shop: Workshop) -> Row:
    """The row of one reduction block by block, polished where that is asked for; its images go through a file, as the
    closed loop reads them.
    """
    from corp_deploy.reduction.loop import Loop as ClosedLoop
    from corp_deploy.reduction.traced_loop import reduce_traced

    size, method = shop.setting.image_size, case.method(shop.setting)

    def on(where: str) -> tuple[nn.Module, int]:
        count = case.images if where == "cpu" else sizes(shop.setting).images
        held = pictures.held_in_bytes("calibration", count, size=size, device=shop.setting.device, seed=case.seed)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "calibration.npy"
            np.save(path, pictures.images_from_bytes(held, "cpu").numpy())
            images = open_images(path, image_shape=(3, size, size), transform=_untransformed)
            dense = models_copy(shop.model(), where)
            reduced = reduce_traced(dense, images, method, loop=ClosedLoop()).model
            if case.loop == "closed":
                return reduced, count
            options = PolishOptions(time_s=sizes(shop.setting).polish_s)
            return polished(dense, reduced, images, options).model, count

    (reduced, count), told = shop.somewhere(case.loop, on)
    return facts_of(case, reduced) | {"images": count} | told | shop.judged(reduced)


def _untransformed(picture: Any) -> Tensor:
    raise AssertionError("an array of images has no transform")


def facts_of(case: Case, reduced: nn.Module) -> Row:
    kind = "MLP only" if case.preset in MLP_ONLY else "joint"
    told = {"row": "reduction", "preset": case.preset, "loop": case.loop, "kind": kind}
    return told | {"sparsity": case.sparsity, "seed": case.seed, "images": case.images, **models.facts(reduced)}


def cases(setting: Setting) -> list[Case]:
    """Presets of one seed, one closed loop and its polish, the curve, the second seed, the other closed loops.

    Those on the same images stand together, as far as that goes: their moments are taken once. Each case is there once.
    """
    size = sizes(setting)
    ordered = dict[str, Case]()

    def add(preset: str, sparsity: float, seed: int, images: int, loop: Loop = "open") -> None:
        case = Case(preset=preset, sparsity=sparsity, seed=seed, images=images, loop=loop)
        ordered.setdefault(case.key, case)

    def loops(sparsity: float, seed: int) -> None:
        add("best", sparsity, seed, size.cpu_loop_images, "closed")
        add("best", sparsity, seed, size.cpu_loop_images)

    def presets(seed: int) -> None:
        for sparsity in size.sparsities:
            for preset in size.presets:
                add(preset, sparsity, seed, size.images)

    presets(size.seeds[0])
    loops(size.sparsities[0], size.seeds[0])
    add("best", size.sparsities[0], size.seeds[0], size.cpu_loop_images, "polished")
    for count in size.curve:
        add("best", size.sparsities[0], size.seeds[0], count)
    for seed in size.seeds[1:]:
        presets(seed)
    for seed in size.seeds:
        for sparsity in size.sparsities:
            loops(sparsity, seed)
    return list(ordered.values())


# Guesses in seconds, the open loop on the GPU; new images add their moments and the eliminations.
SECONDS: Mapping[str, float] = {"best": 2.0, "corp": 4.0, "corp-v1": 2.0, "none": 1.5, "grail": 2.0, "vbp": 1.5}
CLOSED_S, ELIMINATIONS_S, IMAGES_A_SECOND = 13.0, 4.0, 400.0


def tasks(setting: Setting, record: Record) -> list[Task]:
    """The training, then the reductions; drops the rows of a model whose weights are gone."""
    shop = Workshop(setting)
    held = record.done("train")
    if held is not None:
        try:
            kept = model_digest(shop.model()) == held["model_sha256"]
        except NotYet:
            kept = False
        if not kept:
            record.forget()
            shop.checkpoint = None
    train_s = 0.0 if setting.small else 0.8 * training.course(setting).limit_s
    made = [Task(key="train", estimate_s=train_s, run=shop.train)]
    latest: tuple[int, int] | None = None
    for case in cases(setting):
        polish_s = sizes(setting).polish_s if case.loop == "polished" else 0.0
        seconds = SECONDS[case.preset] if case.loop == "open" else CLOSED_S + polish_s
        if case.loop == "open" and latest != (case.seed, case.images):
            latest = case.seed, case.images
            seconds += ELIMINATIONS_S + case.images / IMAGES_A_SECOND
        run = partial(open_loop if case.loop == "open" else closed_loop, case, shop)
        made.append(Task(key=case.key, estimate_s=0.0 if setting.small else seconds, run=run))
    return made
