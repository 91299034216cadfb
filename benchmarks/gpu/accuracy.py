"""What reductions do to a ViT-S trained here on 224x224 images: presets, sparsities, closed loop, calibration sizes.

Accuracy is on held-out images, agreement and relative logit error are against the dense model on the same. The trained
weights are kept in the cache. Without them the part begins anew: rows of two models are never mixed.

Reductions are tried on the GPU and, where corp_deploy doesn't run there, made on the CPU; the row says where, and why
not on the GPU. The closed loop on a CPU walks fewer images; an open loop on as many stands beside it.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from torch import Tensor, nn

from benchmarks.gpu import images as pictures
from benchmarks.gpu import models, training
from benchmarks.gpu.calibration import moments_on
from benchmarks.gpu.record import Record, Row, Task, reason_of
from benchmarks.gpu.setting import ALIGN_HEAD, Setting
from calib.collect import collect
from calib.images import open_images
from calib.moments import MlpMoments, Moments
from corp_deploy import vit
from corp_deploy.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.choices import Choices, choices_from_preset
from corp_deploy.inputs import model_digest
from corp_deploy.obs import Elimination, obs
from perf.accuracy import wilson

JOINT, MLP_ONLY = ("best", "corp", "corp-v1", "none"), ("grail", "vbp")
Loop = Literal["open", "closed"]
Known = dict[str, dict[str, Elimination]]  # by device, then by site
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is swept; `images` calibrate an open loop, `cpu_loop_images` a closed one on a CPU."""

    presets: tuple[str, ...]
    sparsities: tuple[float, ...]
    seeds: tuple[int, ...]
    images: int
    cpu_loop_images: int
    curve: tuple[int, ...]


def sizes(setting: Setting) -> Sizes:
    if setting.small:
        return Sizes(
            presets=("best", "corp"), sparsities=(0.5,), seeds=(0, 1), images=16, cpu_loop_images=8, curve=(8, 16)
        )
    return Sizes(
        presets=(*JOINT, *MLP_ONLY),
        sparsities=(0.5, 0.3, 0.7),
        seeds=(0, 1),
        images=2000,
        cpu_loop_images=128,
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

    def choices(self, setting: Setting) -> Choices:
        return choices_from_preset(
            self.preset,
            mlp_sparsity=self.sparsity,
            attention_sparsity=self.sparsity,
            align_hidden=setting.align_hidden,
            align_head=ALIGN_HEAD,
        )


@dataclass(slots=True)
class Workshop:
    """The dense model, the held-out images and its answers, and the latest moments."""

    setting: Setting
    checkpoint: Checkpoint | None = None
    held_out: tuple[Tensor, Tensor] | None = None
    answers: Tensor | None = None
    latest: tuple[tuple[int, int], Moments, Known] | None = None
    not_on_gpu: dict[Loop, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.setting.cache / ("tiny" if self.setting.small else "vit-s")

    def model(self) -> nn.Module:
        """The dense model on the CPU. Raises FileNotFoundError before it is trained."""
        if self.checkpoint is None:
            if not (self.folder / "config.json").is_file():
                raise FileNotFoundError("no trained weights in the cache: the training comes first")
            self.checkpoint = load_checkpoint(self.folder)
        return self.checkpoint.model

    def train(self) -> Row:
        """Train and keep."""
        self.checkpoint = training.trained(self.setting)
        save(self.checkpoint, self.folder)
        told = {"row": "training", "model_sha256": model_digest(self.checkpoint.model)}
        return told | {key: value for key, value in self.checkpoint.lineage.items() if key != "trained_by"}

    def judged(self, reduced: nn.Module) -> Row:
        """Accuracy, agreement and error of a reduced model."""
        device, size = self.setting.device, self.setting.image_size
        if self.held_out is None or self.answers is None:
            count = training.course(self.setting).held_out_images
            self.held_out = pictures.labelled("held-out", count, size=size, device=device)
            self.answers = training.logits_of(models_copy(self.model(), device), self.held_out[0]).double()
        images, labels = self.held_out
        answers = training.logits_of(models_copy(reduced, device), images).double()
        top = answers.argmax(1)
        right = int((top == labels).sum())
        low, high = wilson(right, len(labels))
        return {
            "accuracy": right / len(labels),
            "accuracy_interval": [low, high],
            "agreement": float((top == self.answers.argmax(1)).double().mean()),
            "relative_error": float((answers - self.answers).norm() / self.answers.norm()),
        }

    def moments(self, seed: int, count: int) -> tuple[Moments, Known]:
        """Of so many images of a seed, with CORP's per-image system; and the eliminations found on them so far."""
        if self.latest is None or self.latest[0] != (seed, count):
            self.latest = None
            device = self.setting.device
            held = pictures.held_in_bytes("calibration", count, size=self.setting.image_size, device=device, seed=seed)
            dense = models_copy(self.model(), device)
            batches = (pictures.images_from_bytes(piece, device) for piece in held.split(50))
            lineage = {"model": model_digest(dense)}
            sites = vit.calibration_sites(dense)
            found = collect(dense, sites, batches, device=device, attention_system=True, lineage=lineage)
            self.latest = (seed, count), found, {}
        return self.latest[1], self.latest[2]

    def somewhere(self, loop: Loop, work: Callable[[str], T]) -> tuple[T, Row]:
        """The work on the GPU or, where that fails, on the CPU; and what the row says of it."""
        if self.setting.device == "cuda" and loop not in self.not_on_gpu:
            try:
                return work("cuda"), {"reduced_on": "cuda"}
            except Exception as error:  # the CPU is asked next and raises what is no matter of the device
                self.not_on_gpu[loop] = reason_of(error)
        return work("cpu"), {"reduced_on": "cpu", "not_on_gpu": self.not_on_gpu.get(loop)}


def models_copy(model: nn.Module, device: str) -> nn.Module:
    """The model itself on the CPU, a copy elsewhere."""
    return model if device == "cpu" else vit.replaced(model, {}).to(device)


def eliminations(model: nn.Module, moments: Moments, ridge_rel: float) -> dict[str, Elimination]:
    """Of every MLP; one serves all sparsities."""
    found = {}
    for part in vit.parts(model).mlps:
        site = moments.sites[part.name]
        assert isinstance(site, MlpMoments), part.name
        found[part.name] = obs(site.covariance_FF, part.fc2.weight.detach().double(), ridge_rel=ridge_rel)
    return found


def open_loop(case: Case, shop: Workshop) -> Row:
    """The row of one reduction from the dense model's moments."""
    from corp_deploy.reduce import reduce

    choices = case.choices(shop.setting)
    moments, known = shop.moments(case.seed, case.images)

    def on(where: str) -> nn.Module:
        there = moments_on(moments, where) if where == "cuda" else moments
        model = models_copy(shop.model(), where)
        if choices.mlp_selection == "obs" and where not in known:
            known[where] = eliminations(model, there, choices.ridge_rel)
        return reduce(model, there, choices, eliminations=known.get(where)).model

    reduced, told = shop.somewhere("open", on)
    return facts_of(case, reduced) | told | shop.judged(reduced)


def closed_loop(case: Case, shop: Workshop) -> Row:
    """The row of one reduction block by block; its images go through a file, as the closed loop reads them."""
    from corp_deploy.closed_loop import reduce_closed_loop

    size, choices = shop.setting.image_size, case.choices(shop.setting)

    def on(where: str) -> tuple[nn.Module, int]:
        count = case.images if where == "cpu" else sizes(shop.setting).images
        held = pictures.held_in_bytes("calibration", count, size=size, device=shop.setting.device, seed=case.seed)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "calibration.npy"
            np.save(path, pictures.images_from_bytes(held, "cpu").numpy())
            images = open_images(path, image_shape=(3, size, size), transform=_untransformed)
            return reduce_closed_loop(models_copy(shop.model(), where), images, choices).model, count

    (reduced, count), told = shop.somewhere("closed", on)
    return facts_of(case, reduced) | {"images": count} | told | shop.judged(reduced)


def _untransformed(picture: Any) -> Tensor:
    raise AssertionError("an array of images has no transform")


def facts_of(case: Case, reduced: nn.Module) -> Row:
    kind = "MLP only" if case.preset in MLP_ONLY else "joint"
    told = {"row": "reduction", "preset": case.preset, "loop": case.loop, "kind": kind}
    return told | {"sparsity": case.sparsity, "seed": case.seed, "images": case.images, **models.facts(reduced)}


def cases(setting: Setting) -> list[Case]:
    """Presets at 50 % of both seeds, the curve, the closed loop, then the other sparsities; each once."""
    size = sizes(setting)
    swept, ordered = size.presets, dict[str, Case]()

    def add(**values: Any) -> None:
        case = Case(**values)
        ordered.setdefault(case.key, case)

    first, *others = size.sparsities
    for seed in size.seeds:
        for preset in swept:
            add(preset=preset, sparsity=first, seed=seed, images=size.images)
    for count in size.curve:
        add(preset="best", sparsity=first, seed=0, images=count)
    for sparsity in size.sparsities:
        add(preset="best", sparsity=sparsity, seed=0, images=size.cpu_loop_images, loop="closed")
        add(preset="best", sparsity=sparsity, seed=0, images=size.cpu_loop_images)
    for seed in size.seeds:
        for sparsity in others:
            for preset in swept:
                add(preset=preset, sparsity=sparsity, seed=seed, images=size.images)
    for seed in size.seeds[1:]:
        for sparsity in size.sparsities:
            add(preset="best", sparsity=sparsity, seed=seed, images=size.cpu_loop_images, loop="closed")
    return list(ordered.values())


# On an H200 with 16 CPU cores, the linear algebra on those.
SECONDS: Mapping[str, float] = {"best": 6.0, "corp": 12.0, "corp-v1": 2.5, "none": 2.0, "grail": 2.5, "vbp": 2.0}
CLOSED_S = 18.0


def tasks(setting: Setting, record: Record) -> list[Task]:
    """The training, then the reductions; drops the rows of a model whose weights are gone."""
    shop = Workshop(setting)
    held = record.done("train")
    if held is not None:
        try:
            kept = model_digest(shop.model()) == held["model_sha256"]
        except FileNotFoundError:
            kept = False
        if not kept:
            record.forget()
            shop.checkpoint = None
    train_s = 0.0 if setting.small else training.course(setting).limit_s + 10.0
    made = [Task(key="train", estimate_s=train_s, run=shop.train)]
    for case in cases(setting):
        seconds = CLOSED_S if case.loop == "closed" else SECONDS[case.preset] + case.images / 1000
        made.append(
            Task(
                key=case.key,
                estimate_s=0.0 if setting.small else seconds,
                run=partial(closed_loop if case.loop == "closed" else open_loop, case, shop),
            )
        )
    return made
