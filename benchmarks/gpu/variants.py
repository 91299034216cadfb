"""Latency of other reductions against dense models: BF16, merged tokens, eight bits, convolutional networks.

Merged tokens and narrower layers are compared at the same share of the MACs. Weights are random, since time doesn't
depend on their values.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.gpu import models
from benchmarks.gpu.quantised import quantised
from benchmarks.gpu.race import DENSE, estimate_s, plan_of, raced
from benchmarks.gpu.record import Record, Refused, Row, Task
from benchmarks.gpu.setting import GEOMETRIES, Setting
from benchmarks.gpu.subjects import Images, Mode, Subject, compile_blocks
from benchmarks.real.search import Schedules, Sparsities
from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs
from corp_deploy.invocation.merging import MergingChoice
from corp_deploy.planning.request import merging_from_choice
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import dense_from_architecture
from perf.runners.module import DTYPES, Precision
from perf.timing.watch import Watch

About = Literal["bf16", "merging", "eight bits", "convnet"]
SPARSITY, SHARE = 0.5, 0.6
CONVNETS = {"ResNet-50": "resnet50", "ConvNeXt-B": "convnext_base"}
SMALL_CONVNETS = {"ResNet-50": "resnet10t", "ConvNeXt-B": "convnext_atto"}
SMALL_SIDE = 64
ALIGNED = (8, 32)  # the least of graphs, and the default of the tool
# Rounding depends on the rounding of a product's inputs; wrong outputs have much larger errors than either.
EIGHT_BITS_TOLERANCE, EIGHT_BITS_NEAR = 0.05, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Subjects to be timed in turns, one of them `dense`, the MACs of an image of each, and further facts."""

    subjects: Mapping[str, Subject]
    macs: Mapping[str, int]
    images: Images
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A row to be measured."""

    about: About
    model: str
    batch: int
    make: Callable[["Variant", Setting], Race]
    compiled: int = 0
    subjects: int = 4

    @property
    def key(self) -> str:
        return f"{self.about} {self.model} batch {self.batch}"


def noise(shape: tuple[int, ...]) -> Images:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def images_of(model: nn.Module, batch: int) -> Images:
    return noise((batch, *traced_model.input_spec(model).shape))


def captured(
    modules: Mapping[str, nn.Module], precision: Precision, setting: Setting, **how: Any
) -> dict[str, Subject]:
    """Return subjects, by default as CUDA graphs."""
    mode: Mode = how.pop("mode", "graph")
    return {
        name: Subject(module=module, mode=mode, precision=precision, device=setting.device, **how)
        for name, module in modules.items()
    }


def in_bf16(variant: Variant, setting: Setting) -> Race:
    """Return the three geometries at half the widths, in bfloat16."""
    dense = models.dense(variant.model, setting)
    forms = {DENSE: models.form(dense, "bf16"), **models.forms(dense, SPARSITY, GEOMETRIES, "bf16", setting)}
    return Race(
        subjects=captured({name: form.module for name, form in forms.items()}, "bf16", setting),
        macs={name: form.facts["macs"] for name, form in forms.items()},
        images=images_of(dense, variant.batch),
        facts={"precision": "bf16", "sparsity": SPARSITY},
    )


def merged(variant: Variant, setting: Setting) -> Race:
    """Return merged tokens, dropped tokens and narrower layers, at the same share of the MACs."""
    share, dense = 0.9 if setting.small else SHARE, models.dense(variant.model, setting)
    tokens, sparsity = Schedules(dense).of("each", share), Sparsities(dense).of("joint", share)
    narrower = {DENSE: dense}
    for how in ("merge", "drop"):
        chosen = merging_from_choice(MergingChoice(merge_tokens=tokens, merge_how=how), dense)
        narrower[f"{how} {tokens} tokens in each block"] = traced_model.with_merging(dense, chosen)
    narrower["square"] = models.reduced(dense, sparsity, "square", setting)
    forms = {name: models.form(module, setting.precision) for name, module in narrower.items()}
    return Race(
        subjects=captured({name: form.module for name, form in forms.items()}, setting.precision, setting),
        macs={name: form.facts["macs"] for name, form in forms.items()},
        images=images_of(dense, variant.batch),
        facts={"precision": setting.precision, "sparsity": sparsity, "share": share},
    )


def answer(model: nn.Module, images: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(images)
    return logits.double().cpu()


def in_eight_bits(variant: Variant, setting: Setting) -> Race:
    """Return FP8 and INT8 products, dense and with square heads at half the widths, and the same in half precision.

    Blocks are compiled, which fuses rounding to eight bits with the operation before it.
    """
    dense, precision = models.dense(variant.model, setting), setting.precision
    plain = {DENSE: models.form(dense, precision), **models.forms(dense, SPARSITY, ("square",), precision, setting)}
    images = images_of(dense, variant.batch)
    seen = torch.from_numpy(images).to(setting.device, DTYPES[precision])
    modules = {name: form.module for name, form in plain.items()}
    counts = {name: form.facts["macs"] for name, form in plain.items()}
    for name, form in plain.items():
        wanted = answer(form.module, seen)
        for how in ("fp8", "int8"):
            made = quantised(form.module, models.block_names(form.module), seen, how)
            away = float((answer(made, seen) - wanted).norm() / wanted.norm())
            if not away < EIGHT_BITS_NEAR:
                raise Refused(f"{name} in {how} is {away:.2g} of the norm away from {precision}")
            modules[f"{name}, {how}"], counts[f"{name}, {how}"] = made, counts[name]
    compiler = "eager" if setting.small else "inductor"
    for module in modules.values():
        compile_blocks(module, compiler)
    return Race(
        subjects=captured(modules, precision, setting, mode="compiled", tolerance=EIGHT_BITS_TOLERANCE),
        macs=counts,
        images=images,
        facts={"precision": precision, "sparsity": SPARSITY, "compiler": compiler},
    )


def convolutional(variant: Variant, setting: Setting) -> Race:
    """Return convolutional networks with half the MACs at uniform widths, with channels last."""
    names = SMALL_CONVNETS if setting.small else CONVNETS
    torch.manual_seed(0)
    dense = dense_from_architecture(Architecture(name=names[variant.model])).requires_grad_(False).to(setting.device)
    modules, sparsities = {DENSE: dense}, {}
    for align in ALIGNED:
        name = f"reduced, channels by {align}"
        modules[name], sparsities[name] = models.at_macs_share(dense, 0.9 if setting.small else 0.5, align)
    counts = {name: macs(module) for name, module in modules.items()}
    for module in modules.values():
        module.to(DTYPES[setting.precision]).to(memory_format=torch.channels_last)
    side = SMALL_SIDE if setting.small else setting.image_size
    return Race(
        subjects=captured(modules, setting.precision, setting, channels_last=True),
        macs=counts,
        images=noise((variant.batch, 3, side, side)),
        facts={"precision": setting.precision, "sparsity": sparsities},
    )


def measured(variant: Variant, setting: Setting, watch: Watch) -> Row:
    """Measure one variant."""
    race = variant.make(variant, setting)
    timed = raced(race.subjects, race.images, race.macs, plan_of(variant.batch, setting), watch)
    told = {"row": "variant", "about": variant.about, "model": variant.model, "batch": variant.batch}
    modes = {subject.mode for subject in race.subjects.values()}
    return {**told, **race.facts, "mode": " and ".join(sorted(modes)), "macs": dict(race.macs), **timed}


def variants(setting: Setting) -> Iterator[Variant]:
    """Yield one variant of each kind, then the others."""
    if setting.small:
        yield Variant(about="bf16", model="DeiT-T", batch=2, make=in_bf16)
        yield Variant(about="merging", model="DeiT-T", batch=2, make=merged)
        yield Variant(about="eight bits", model="DeiT-T", batch=2, make=in_eight_bits)
        yield from (Variant(about="convnet", model=name, batch=2, make=convolutional) for name in CONVNETS)
        return
    yield from (Variant(about="convnet", model=name, batch=16, make=convolutional, subjects=3) for name in CONVNETS)
    yield Variant(about="bf16", model="DeiT-B", batch=16, make=in_bf16)
    yield Variant(about="merging", model="DeiT-B", batch=16, make=merged)
    yield Variant(about="eight bits", model="DeiT-B", batch=64, make=in_eight_bits, compiled=6, subjects=6)
    yield Variant(about="bf16", model="DeiT-H", batch=16, make=in_bf16)
    yield Variant(about="merging", model="DeiT-L", batch=16, make=merged)
    yield from (
        Variant(about="convnet", model=name, batch=batch, make=convolutional, subjects=3)
        for batch in (64, 1)
        for name in CONVNETS
    )
    yield Variant(about="bf16", model="DeiT-B", batch=1, make=in_bf16)
    yield Variant(about="merging", model="DeiT-B", batch=1, make=merged)
    yield Variant(about="merging", model="DeiT-B", batch=64, make=merged)
    yield Variant(about="eight bits", model="DeiT-H", batch=16, make=in_eight_bits, compiled=6, subjects=6)
    yield Variant(about="eight bits", model="DeiT-B", batch=1, make=in_eight_bits, compiled=6, subjects=6)


# Estimated seconds to make the models; those of merging include the search for a schedule.
MAKING_S: Mapping[About, float] = {"bf16": 7.0, "merging": 10.0, "eight bits": 5.0, "convnet": 12.0}
CONV_MACS = {"ResNet-50": int(4.1e9), "ConvNeXt-B": int(15.4e9)}


def tasks(setting: Setting, record: Record, watch: Watch) -> list[Task]:
    """Return a task for each variant."""

    def seconds(variant: Variant) -> float:
        counted = CONV_MACS[variant.model] if variant.about == "convnet" else models.macs_of(variant.model, setting)
        making_s = 0.0 if setting.small else MAKING_S[variant.about]
        return making_s + estimate_s(counted, variant.batch, variant.subjects, variant.compiled, setting)

    def task(variant: Variant) -> Task:
        return Task(key=variant.key, estimate_s=seconds(variant), run=lambda: measured(variant, setting, watch))

    return [task(variant) for variant in variants(setting)]
