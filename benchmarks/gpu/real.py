"""Reductions of a DINOv2 ViT-S/14 with real weights on photographs, by share of the MACs, widths and loop.

The unpacked model (see benchmarks/real/packed.py) is the dense one. Crops of some photographs are the calibration set;
crops of others judge.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.gpu.record import Record, Row, Task
from benchmarks.gpu.setting import Setting
from benchmarks.real.measures import Outputs, figures, outputs
from benchmarks.real.packed import ABOUT, Unpacked, normalised, unpack
from benchmarks.real.search import Sparsities
from calib.images import Images
from calib.moments import Moments
from corp_deploy.families.counting import macs, parameters
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.execution import reduce_as_asked
from corp_deploy.planning.request import build_request
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.store.checkpoint import Checkpoint, on_device
from corp_deploy.store.input_sets import images_for_model
from ground.effort import Stopwatch
from perf.runners.protocol import build_stopwatch

Widths = Literal["uniform", "by site"]
Loop = Literal["open", "closed"]
BATCH = 16


def clock_s(device: str) -> float:
    """Return the host's time once the device has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One reduction: preset best at a share of the dense MACs."""

    share: float
    widths: Widths
    loop: Loop

    @property
    def key(self) -> str:
        return f"{self.widths} {self.loop} loop {self.share:.0%} of the MACs"


class Subject:
    """The dense model on the device, its crops and its outputs."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.device = setting, setting.device

    @cached_property
    def unpacked(self) -> Unpacked:
        """Return the packed model and crops. Raises Missing if there are none."""
        return unpack(self.setting.packed)

    @cached_property
    def dense(self) -> Checkpoint:
        return on_device(self.unpacked.dense, self.device)

    @cached_property
    def images(self) -> Images:
        """Return the calibration images, read from a file as commands read them."""
        path = self.setting.cache / "real" / "calibration.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, self.unpacked.calibration.pixels)
        return images_for_model(self.dense.model, path)

    @cached_property
    def moments(self) -> Moments:
        return calibrate(self.dense, self.images, batch_size=BATCH, device=self.device)

    @cached_property
    def macs(self) -> int:
        return macs(self.dense.model)

    @cached_property
    def sparsities(self) -> Sparsities:
        return Sparsities(self.unpacked.dense.model)

    @cached_property
    def held_out(self) -> Tensor:
        return normalised(self.unpacked.held_out.pixels)

    @cached_property
    def answers(self) -> Outputs:
        return self.outputs(self.dense.model)

    def outputs(self, model: nn.Module) -> Outputs:
        return outputs(model, self.held_out, self.unpacked.head.to(self.device))

    def judged(self, model: nn.Module) -> Row:
        """Return a model's size, and its errors against the dense model on held-out photographs."""
        size = {"macs_share": macs(model) / self.macs, "parameters": parameters(model)}
        return {**size, **figures(self.outputs(model), self.answers)}

    def reduced(self, case: Case, watch: Stopwatch | None = None) -> nn.Module:
        """Return the reduced model of a case; `watch` records the time of its parts."""
        uniform = case.widths == "uniform"
        sparsity = self.sparsities.of("joint", case.share) if uniform else None
        options = ReduceOptions(
            mlp=sparsity,
            attn=sparsity,
            macs=None if uniform else case.share,
            closed_loop="asymmetric" if case.loop == "closed" else None,
        )
        asked = build_request(options)
        return reduce_as_asked(self.dense, self.moments, asked, images=self.images, watch=watch)[0].model


def prepared(subject: Subject) -> Row:
    """Calibrate; return the facts of the model and its images, and the seconds."""
    dense, begun_s = subject.dense, clock_s(subject.device)
    moments = subject.moments
    seconds = clock_s(subject.device) - begun_s
    unpacked = subject.unpacked
    return {
        "row": "subject",
        "model": dense.architecture.name,
        "macs": subject.macs,
        "parameters": parameters(dense.model),
        "images": moments.images,
        "photographs": len(set(unpacked.calibration.photographs)),
        "held_out_images": len(unpacked.held_out.pixels),
        "held_out_photographs": len(set(unpacked.held_out.photographs)),
        "seconds": seconds,
    }


def reduction(case: Case, subject: Subject) -> Row:
    """Measure one reduction, without its moments."""
    assert subject.moments is not None
    begun_s, watch = clock_s(subject.device), build_stopwatch(subject.device)
    model = subject.reduced(case, watch)
    seconds = clock_s(subject.device) - begun_s
    told = {"row": "reduction", "share": case.share, "widths": case.widths, "loop": case.loop, "seconds": seconds}
    return told | {"efforts": watch.as_json()} | subject.judged(model)


def cases(setting: Setting) -> list[Case]:
    """Return all cases of one share, then those of the others."""
    order: tuple[tuple[Widths, Loop], ...] = (("by site", "closed"), ("by site", "open"))
    order += (("uniform", "closed"), ("uniform", "open"))
    shares = (0.8,) if setting.small else (0.66, 0.5, 0.8)
    return [Case(share=share, widths=widths, loop=loop) for share in shares for widths, loop in order]


# Estimated seconds: unpacking and calibrating, a plan by site, a walk through the blocks, a solution of all sites.
PREPARING_S, PLANNING_S, WALKING_S, SOLVING_S = 25.0, 20.0, 15.0, 8.0


def tasks(setting: Setting, record: Record) -> list[Task]:
    """Return a task for the calibration, and one for each case."""
    subject = Subject(setting)

    def estimate_s(case: Case) -> float:
        by_site = PLANNING_S if case.widths == "by site" else 0.0
        return by_site + SOLVING_S + (WALKING_S if case.loop == "closed" else 0.0)

    def task(key: str, seconds: float, run: Callable[[], Row]) -> Task:
        packed = (setting.packed / ABOUT).is_file()
        return Task(key=key, estimate_s=seconds if packed and not setting.small else 0.0, run=run)

    first = task("the model and its moments", PREPARING_S, partial(prepared, subject))
    return [first, *(task(case.key, estimate_s(case), partial(reduction, case, subject)) for case in cases(setting))]
