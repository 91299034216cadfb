"""Latency in torch, dense against 0.1 to 0.7 joint sparsity, heads padded, square and ragged.

Weights are random, since time doesn't depend on their values.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch import nn

from benchmarks.gpu import models
from benchmarks.gpu.kernels import profiled
from benchmarks.gpu.race import DENSE, estimate_s, plan_of, raced
from benchmarks.gpu.record import Record, Row, Task
from benchmarks.gpu.setting import GEOMETRIES, Setting
from benchmarks.gpu.subjects import Mode, Subject, compile_blocks
from corp_deploy.spec.widths import HeadGeometry
from perf.runners.module import DTYPES
from perf.timing.watch import Watch

GOALS_SPARSITY = 0.5
# Seconds that the host of an H100 took to make the forms of a model.
MAKING_S = {"DeiT-T": 6.0, "DeiT-S": 6.0, "DeiT-B": 6.0, "DeiT-L": 17.0, "DeiT-H": 23.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row: a model, how it is called, the joint sparsity and the batch."""

    model: str
    mode: Mode
    sparsity: float
    batch: int
    geometries: tuple[HeadGeometry, ...] = GEOMETRIES

    @property
    def key(self) -> str:
        return f"{self.model} {self.mode} {self.sparsity:.0%} batch {self.batch}"

    def estimate_s(self, macs: int, setting: Setting) -> float:
        """Estimate the seconds to build, warm up and measure all subjects."""
        compiled = len(self.geometries) + 1 if self.mode == "compiled" else 0
        return estimate_s(macs, self.batch, len(self.geometries) + 1, compiled, setting)


@dataclass(slots=True)
class Shelf:
    """All dense models and their forms; of sparsities other than the goals', only the latest forms are kept."""

    setting: Setting
    dense: dict[str, nn.Module] = field(default_factory=dict)
    kept: dict[tuple[str, bool, float], dict[str, models.Form]] = field(default_factory=dict)

    @property
    def compiler(self) -> str:
        return "eager" if self.setting.small else "inductor"

    def forms_of(self, case: Case) -> dict[str, models.Form]:
        """Return the forms of a case by the name of the subject."""
        if case.model not in self.dense:
            self.dense[case.model] = models.dense(case.model, self.setting)
        dense, precision, compiled = self.dense[case.model], self.setting.precision, case.mode == "compiled"
        at = case.model, compiled, case.sparsity
        if at not in self.kept:
            self.kept = {key: forms for key, forms in self.kept.items() if key[2] == GOALS_SPARSITY and not key[1]}
        kept = self.kept.setdefault(at, {})
        missing = [each for each in case.geometries if each not in kept]
        new = {} if kept else {DENSE: models.form(dense, precision)}
        new |= models.forms(dense, case.sparsity, missing, precision, self.setting)
        if compiled:
            for form in new.values():
                compile_blocks(form.module, self.compiler)
        kept |= new
        return {name: kept[name] for name in (DENSE, *case.geometries)}


def measured(case: Case, shelf: Shelf, watch: Watch) -> Row:
    """Measure one case."""
    setting = shelf.setting
    forms = shelf.forms_of(case)
    subjects = {
        name: Subject(module=form.module, mode=case.mode, precision=setting.precision, device=setting.device)
        for name, form in forms.items()
    }
    shape = case.batch, 3, setting.image_size, setting.image_size
    images = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    widths = {name: form.facts for name, form in forms.items()}
    macs = {name: facts["macs"] for name, facts in widths.items()}
    return {
        **{key: value for key, value in asdict(case).items() if key != "geometries"},
        "precision": setting.precision,
        "cuda_graph": setting.device == "cuda" and case.mode != "eager",
        "compiler": shelf.compiler if case.mode == "compiled" else None,
        "widths": widths,
        **raced(subjects, images, macs, plan_of(case.batch, setting), watch),
    }


def attention(name: str, shelf: Shelf, batch: int) -> Row:
    """Return the attention kernel of each geometry of a model at the goals' sparsity."""
    setting = shelf.setting
    forms = shelf.forms_of(Case(model=name, mode="graph", sparsity=GOALS_SPARSITY, batch=batch))
    shape = batch, 3, setting.image_size, setting.image_size
    images = torch.randn(shape, device=setting.device, dtype=DTYPES[setting.precision])
    found = {each: {**form.facts, **profiled(form.module, images)} for each, form in forms.items()}
    return {"row": "attention", "model": name, "batch": batch, "sparsity": GOALS_SPARSITY, "kernels": found}


def cases(setting: Setting) -> Iterator[Case]:
    """Yield the cases that the goals judge, then cases near them."""
    if setting.small:
        yield from (Case(model=name, mode="graph", sparsity=GOALS_SPARSITY, batch=2) for name in setting.models)
        yield Case(model="DeiT-T", mode="compiled", sparsity=GOALS_SPARSITY, batch=1, geometries=("padded",))
        return
    yield Case(model="DeiT-H", mode="graph", sparsity=GOALS_SPARSITY, batch=16)
    yield from (Case(model=name, mode="graph", sparsity=GOALS_SPARSITY, batch=1) for name in reversed(setting.models))
    for batch in (16, 64, 256, 8, 32):
        yield from (Case(model=name, mode="graph", sparsity=GOALS_SPARSITY, batch=batch) for name in setting.models)
    for sparsity in (0.3, 0.7, 0.1, 0.2, 0.4, 0.6):
        for name, batch in (("DeiT-H", 16), ("DeiT-B", 16), ("DeiT-B", 1)):
            yield Case(model=name, mode="graph", sparsity=sparsity, batch=batch)
    yield Case(model="DeiT-S", mode="compiled", sparsity=GOALS_SPARSITY, batch=1, geometries=("padded",))
    yield Case(model="DeiT-S", mode="eager", sparsity=GOALS_SPARSITY, batch=1)


def tasks(setting: Setting, record: Record, watch: Watch) -> list[Task]:
    """Return tasks for the kernels of every model, which take seconds, and for each case."""
    shelf = Shelf(setting)
    macs = {name: models.macs_of(name, setting) for name in setting.models}
    batch = 2 if setting.small else 16

    def kernels(name: str) -> Task:
        return Task(
            key=f"attention {name}",
            estimate_s=0.0 if setting.small else MAKING_S[name],
            run=lambda: attention(name, shelf, batch),
        )

    def case_task(case: Case) -> Task:
        seconds = case.estimate_s(macs[case.model], setting)
        return Task(key=case.key, estimate_s=seconds, run=lambda: {"row": "latency", **measured(case, shelf, watch)})

    ordered: dict[str, Case] = {}
    for case in cases(setting):
        ordered.setdefault(case.key, case)
    return [*map(kernels, setting.models), *map(case_task, ordered.values())]
