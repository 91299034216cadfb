"""Dense against reduced, 0.1 to 0.7 joint sparsity, heads padded, square and ragged, in torch.

Dense, dense again and the three geometries take turns within every round in one process (see perf.timing.rounds);
ratios are medians over rounds of the ratio within a round, with bootstrap intervals (perf.stats.stats). Compute is the
time between CUDA events around the model; wall time adds the copies of images and logits. Weights are random, which
costs the same time."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.gpu import models
from benchmarks.gpu.kernels import profiled
from benchmarks.gpu.record import Record, Refused, Row, Task, reason_of
from benchmarks.gpu.setting import GEOMETRIES, Setting
from benchmarks.gpu.subjects import Images, Mode, Subject, compile_blocks
from corp_deploy.families import timm_vit as vit
from corp_deploy.families.head_attention import Geometry
from perf.record.runs import Block
from perf.runners.module import DTYPES
from perf.stats.quiet import samples
from perf.stats.stats import Interval, median_interval, rate_interval, ratio_of_medians
from perf.stats.summary import finite, realised_share
from perf.timing.laps import Bound, Plan, warm_up
from perf.timing.rounds import calls_per_block, measure_rounds
from perf.timing.watch import Watch

SPARSITIES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
BATCHES = (1, 8, 16, 32, 64, 256)
DENSE, AGAIN = "dense", "dense again"
# A GPU whose work is queued ahead is steady within a few calls; six rounds are the fewest that give an interval.
PLAN = Plan(block_ms=10.0, min_rounds=8, noise_rounds=0, warm_up_window=8, warm_up_min_s=0.1, warm_up_limit_s=2.0)
LONG_PLAN = replace(PLAN, min_rounds=6, warm_up_window=4)
SMALL_PLAN = Plan(block_ms=1.0, min_rounds=6, noise_rounds=0, warm_up_window=4, warm_up_min_s=0.0, warm_up_limit_s=0.1)
# Guesses that rows are planned by: multiply-adds a second of a half-precision ViT; seconds to compile one block.
RATE, COMPILING_S = 2e14, 9.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row: a model, how it is called, the joint sparsity and the batch."""

    model: str
    mode: Mode
    sparsity: float
    batch: int
    geometries: tuple[Geometry, ...] = GEOMETRIES

    @property
    def key(self) -> str:
        return f"{self.model} {self.mode} {self.sparsity:.0%} batch {self.batch}"

    @property
    def plan(self) -> Plan:
        """Fewer warm-up calls and rounds where one call takes a fifth of a second."""
        return LONG_PLAN if self.batch >= 256 else PLAN

    def estimate_s(self, macs: int) -> float:
        """A guess at building, warming and measuring all subjects."""
        plan, subjects, call_s = self.plan, len(self.geometries) + 2, macs * self.batch / RATE + 2e-4
        compiling_s = COMPILING_S * (subjects - 1) if self.mode == "compiled" else 0.0
        rounds_s = 2 * plan.min_rounds * max(plan.block_ms / 1e3, call_s)
        warm_s = max(plan.warm_up_min_s, plan.warm_up_window * call_s) + 6 * call_s
        return 1.2 + compiling_s + subjects * (rounds_s + warm_s)


@dataclass(slots=True)
class Shelf:
    """Modules in use: every dense one, and the reduced ones of the latest model, way of calling and sparsity."""

    setting: Setting
    dense: dict[str, nn.Module] = field(default_factory=dict)
    latest: tuple[str, bool, float] | None = None
    modules: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def compiler(self) -> str:
        return "eager" if self.setting.small else "inductor"

    def modules_of(self, case: Case) -> dict[str, nn.Module]:
        """By subject name."""
        if case.model not in self.dense:
            self.dense[case.model] = models.dense(case.model, self.setting, self.setting.precision)
        dense, compiled = self.dense[case.model], case.mode == "compiled"
        if self.latest != (case.model, compiled, case.sparsity):
            self.latest = case.model, compiled, case.sparsity
            self.modules = {DENSE: compile_blocks(deepcopy(dense), self.compiler) if compiled else dense}
        for geometry in case.geometries:
            if geometry not in self.modules:
                module = models.reduced(dense, case.sparsity, geometry, self.setting)
                self.modules[geometry] = compile_blocks(module, self.compiler) if compiled else module
        return {name: self.modules[name] for name in (DENSE, *case.geometries)}


def figures(interval: Interval | None) -> list[float | None] | None:
    """Value, low, high; an open end is null."""
    return None if interval is None else [interval.value, finite(interval.low), finite(interval.high)]


def bounds_of(subjects: dict[str, Subject], images: Images) -> tuple[dict[str, Bound], dict[str, str]]:
    """Subjects ready to be timed, and those refused with the reason. Raises Refused where it is the dense one."""
    bounds, refused = dict[str, Bound](), dict[str, str]()
    for name, subject in subjects.items():
        try:
            bounds[name] = subject.bind(images)
        except Refused as error:
            if name == DENSE:
                raise
            refused[name] = reason_of(error)
    bounds[AGAIN] = subjects[DENSE].bind(images)
    return bounds, refused


def timed(bounds: dict[str, Bound], plan: Plan, watch: Watch) -> tuple[tuple[Block, ...], int]:
    """The blocks of all rounds, and how many calls each has."""
    call_ms = min(warm_up(bound, plan, perf_counter_ns).call_ms() for bound in bounds.values())
    calls = calls_per_block(call_ms, plan.block_ms)
    return measure_rounds(bounds, plan.min_rounds, calls=calls, clock=perf_counter_ns, watch=watch), calls


def subject_figures(blocks: tuple[Block, ...], name: str, batch: int, macs: dict[str, int]) -> Row:
    """p50, throughput and what the reduction brought, of one subject."""
    own, reference, wall = (samples(blocks, *at) for at in ((name,), (DENSE,), (name, "wall")))
    speedup = ratio_of_medians(reference, own)
    p50 = median_interval(own)
    images_R = np.asarray([batch * len(times) for times in wall], dtype=np.float64)
    rate = rate_interval(images_R, np.asarray([times.sum() / 1e3 for times in wall]))
    return {
        "round_medians_ms": [float(np.median(times)) for times in own],
        "p50_ms": figures(p50),
        "images_per_s_compute": batch / p50.value * 1e3,
        "images_per_s_wall": figures(rate),
        "speedup": figures(speedup),
        "realised_share": realised_share(speedup, macs[DENSE], macs.get(name, macs[DENSE])),
    }


def measured(case: Case, shelf: Shelf, watch: Watch) -> Row:
    """The row of one case."""
    setting = shelf.setting
    modules = shelf.modules_of(case)
    subjects = {
        name: Subject(module=module, mode=case.mode, precision=setting.precision, device=setting.device)
        for name, module in modules.items()
    }
    shape = (case.batch, *vit.input_spec(modules[DENSE]).shape)
    images = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    widths = {name: models.facts(module) for name, module in modules.items()}
    bounds, refused = bounds_of(subjects, images)
    blocks, calls = timed(bounds, SMALL_PLAN if setting.small else case.plan, watch)
    macs = {name: facts["macs"] for name, facts in widths.items()}
    return {
        **{key: value for key, value in asdict(case).items() if key != "geometries"},
        "precision": setting.precision,
        "cuda_graph": setting.device == "cuda" and case.mode != "eager",
        "compiler": shelf.compiler if case.mode == "compiled" else None,
        "calls_per_block": calls,
        "rounds": len({block.round for block in blocks}),
        "dropped_rounds": len({block.round for block in blocks if block.dropped is not None}),
        "widths": widths,
        "subjects": {name: subject_figures(blocks, name, case.batch, macs) for name in bounds},
        "refused": refused,
    }


def attention(name: str, setting: Setting, batch: int, sparsity: float) -> Row:
    """The row that says which attention kernel each geometry of a model runs."""
    dense = models.dense(name, setting, setting.precision)
    shape, dtype = (batch, *vit.input_spec(dense).shape), DTYPES[setting.precision]
    images = torch.randn(shape, device=setting.device, dtype=dtype)
    found: dict[str, Any] = {DENSE: {**models.facts(dense), **profiled(dense, images)}}
    for geometry in GEOMETRIES:
        module = models.reduced(dense, sparsity, geometry, setting)
        found[geometry] = {**models.facts(module), **profiled(module, images)}
    return {"row": "attention", "model": name, "batch": batch, "sparsity": sparsity, "kernels": found}


def cases(setting: Setting) -> Iterator[Case]:
    """Those that the goals judge first, then the neighbourhood of these; with `everything` all others at the end."""
    if setting.small:
        yield from (Case(model=name, mode="graph", sparsity=0.5, batch=2) for name in setting.models)
        yield Case(model="DeiT-T", mode="compiled", sparsity=0.5, batch=1, geometries=("padded",))
        return
    yield Case(model="DeiT-H", mode="graph", sparsity=0.5, batch=16)
    yield from (Case(model=name, mode="graph", sparsity=0.5, batch=1) for name in reversed(setting.models))
    for name in ("DeiT-H", "DeiT-B", "DeiT-S", "DeiT-L", "DeiT-T"):
        yield from (Case(model=name, mode="graph", sparsity=0.5, batch=batch) for batch in (16, 64, 8, 32))
    for sparsity in (0.3, 0.7, 0.1, 0.2, 0.4, 0.6):
        for name, batch in (("DeiT-H", 16), ("DeiT-B", 16), ("DeiT-B", 1)):
            yield Case(model=name, mode="graph", sparsity=sparsity, batch=batch)
    yield Case(model="DeiT-S", mode="compiled", sparsity=0.5, batch=1, geometries=("padded",))
    yield Case(model="DeiT-S", mode="eager", sparsity=0.5, batch=1)
    yield from (Case(model=name, mode="graph", sparsity=0.5, batch=256) for name in setting.models)
    if setting.everything:
        modes: tuple[Mode, ...] = ("graph", "compiled")
        for mode, sparsity, name, batch in product(modes, SPARSITIES, setting.models, BATCHES):
            yield Case(model=name, mode=mode, sparsity=sparsity, batch=batch)


def tasks(setting: Setting, record: Record, watch: Watch) -> list[Task]:
    """Kernels of every model first, which takes seconds; then the cases, each once."""
    shelf = Shelf(setting)
    macs = {name: models.macs_of(name, setting) for name in setting.models}
    batch = 2 if setting.small else 16

    def kernels(name: str) -> Task:
        return Task(
            key=f"attention {name}",
            estimate_s=0.0 if setting.small else 1.0,
            run=lambda: attention(name, setting, batch, 0.5),
        )

    def case_task(case: Case) -> Task:
        seconds = 0.0 if setting.small else case.estimate_s(macs[case.model])
        return Task(key=case.key, estimate_s=seconds, run=lambda: {"row": "latency", **measured(case, shelf, watch)})

    ordered: dict[str, Case] = {}
    for case in cases(setting):
        ordered.setdefault(case.key, case)
    return [*map(kernels, setting.models), *map(case_task, ordered.values())]
