"""Models that a family serves once more by their traced programs: the same sites, the same weights, the same engines?

    python -m benchmarks.coverage.beside --output benchmarks/results/coverage_beside.json

A name of each kind that families serve, made small, with random weights of some structure, is loaded, calibrated and
reduced by its family, and with all families hidden, so that its sites are looked for in its program. A row has the
sites that one way alone has, with what the program's refused ones say; how far the outputs are apart where half of the
sites that both have went, beside what is lost and what the family's own result changes by when its moments are summed
up in another order; and the kernels of TensorRT-RTX's half-precision plan. With --full a few names of their own
widths tell the seconds that loading and reducing takes.
"""

import fnmatch
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import click
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.real.record import Record
from calib.input_set import InputSet
from calib.moments import Moments
from corp_deploy.families import family, timm_library, traced_model, usual
from corp_deploy.families.architecture import Architecture
from corp_deploy.families.channel_site import ChannelSite
from corp_deploy.families.family import sites_of
from corp_deploy.families.head_site import HeadSite
from corp_deploy.families.idle_options import kinds_of
from corp_deploy.families.site import Site
from corp_deploy.families.traced_pairs import TracedPairs
from corp_deploy.machine import versions
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.method import Method
from corp_deploy.reduction.model import Reduction, reduce, uniform_widths
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.onnx_file import export_checkpoint

from .chain import BATCH, CALIBRATION, JUDGED, Subject, away, fused, method
from .instances import INSTANCES, Instance
from .models import architecture_of, inputs, outputs, spread_

KIND, KEY = "benchmarks/coverage-beside", ("name",)
NAMES = """
vit_tiny_patch16_224 vit_medium_patch16_reg4_gap_256 vit_base_patch16_rpn_224 vit_small_patch16_18x2_224
flexivit_small deit_tiny_patch16_224 deit_small_distilled_patch16_224 deit3_small_patch16_224 vit_small_patch14_dinov2
vit_giant_patch14_dinov2 vit_base_patch16_clip_quickgelu_224 vit_base_patch16_siglip_224 aimv2_large_patch14_224
beit3_base_patch16_224
"""
FULL = ("vit_tiny_patch16_224", "vit_small_patch16_224")
PRESETS, TIMES, FITTED = ("best", "best square", "corp"), 3, 16
SIDE = 64
"""Of the images for names of their own widths, on which nothing that is timed depends."""
PARTS = {"traced values": "v", "traced streams": "stream"}


@contextmanager
def no_families() -> Iterator[None]:
    """Every model of timm's is timm's own, and traced."""
    bare = SimpleNamespace(build=timm_library.build, accepts=lambda _: False)
    alone = usual.complete(traced_model)
    known = {"timm": bare, traced_model.NAME: alone}
    with patch.object(family, "_FAMILIES", known), patch.object(family, "_OF_TIMM", (alone,)):
        yield


@torch.no_grad()
def write_weights(architecture: Architecture, path: Path) -> None:
    """Random ones of timm's own modules, whose norms know what they get."""
    torch.manual_seed(0)
    with no_families():
        model = dense_from_architecture(architecture)
    spread_(model, 0)
    norms = [each for each in model.modules() if isinstance(each, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    if norms:
        model.train()(torch.randn(FITTED, *traced_model.input_spec(model).shape))
    save_file({name: each.contiguous() for name, each in model.state_dict().items()}, path)


def parts_of(site: Site) -> Iterator[tuple[str, int]]:
    """What of a site can go: queries and keys, values, or other channels, and how many."""
    if isinstance(site, HeadSite):
        yield from () if site.keeps_qk else (("qk", site.groups * site.qk),)
        yield from () if site.keeps_v else (("v", site.groups * site.v),)
    elif isinstance(site, TracedPairs):
        yield "qk", len(site.groups_HP) * site.dims
    else:
        yield PARTS.get(site.kind, "channels"), site.width if isinstance(site, ChannelSite) else site.size


def _inside(name: str, of_family: str) -> bool:
    return f"{name}.".startswith((f"{of_family}.", f"{of_family}#"))


def _beside(name: str, of_family: str) -> bool:
    """In a block where the family gives its site another name than timm's module."""
    return _inside(name, of_family.rpartition(".")[0])


def matched(own: tuple[Site, ...], found: tuple[Site, ...]) -> tuple[set[str], Counter[str], Counter[str]]:
    """Which sites of a program the family has too, and what either has alone, in words."""
    left = {site.name: Counter(parts_of(site)) for site in own}
    both, more = set[str](), Counter[str]()
    for site in found:
        (part,) = parts_of(site)
        alike = (name for way in (_inside, _beside) for name in left if way(site.name, name) and left[name][part] > 0)
        of_family = next(alike, None)
        if of_family is None:
            more[f"{part[0]} {part[1]}"] += 1
        else:
            left[of_family][part] -= 1
            both.add(site.name)
    return both, Counter(f"{part} {size}" for each in left.values() for part, size in each.elements()), more


def asked(preset: str) -> Method:
    name, _, geometry = preset.partition(" ")
    return replace(method(name, 0.5), geometry="square") if geometry else method(name, 0.5)


def half_of(model: nn.Module, moments: Moments, preset: str, only: Collection[str], **more: Any) -> Reduction:
    how = asked(preset)
    widths = {name: width for name, width in uniform_widths(model, how).items() if name in only}
    return reduce(model, moments, how, widths=widths, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A model by its family or by its program, loaded from weights, with images to fit it to and others to judge by."""

    hidden: Callable[[], AbstractContextManager[None]]
    load: Callable[[], Checkpoint]
    checkpoint: Checkpoint
    fitted: InputSet
    judged: InputSet

    @property
    def model(self) -> nn.Module:
        return self.checkpoint.model

    def calibrated(self, images: InputSet, *, batch: int = BATCH) -> Moments:
        statistics = Statistics(attention_system="heads" in kinds_of(self.model))
        return calibrate(self.checkpoint, images, batch_size=batch, statistics=statistics)

    def reduced(self, moments: Moments, preset: str, only: Collection[str], **more: Any) -> Reduction:
        """Half of these sites."""
        return half_of(self.model, moments, preset, only, **more)

    def answers(self, model: nn.Module) -> Tensor:
        return outputs(model, self.judged.batches(BATCH))


def ways_of(instance: Instance, architecture: Architecture, scratch: Path) -> Iterator[Way]:
    """By its family, and by its program."""
    weights = scratch / "weights.safetensors"
    write_weights(architecture, weights)

    def load() -> Checkpoint:
        return load_dense(architecture.name, weights=weights, kwargs=architecture.kwargs)

    for hidden in (nullcontext, no_families):
        with hidden():
            model = (checkpoint := load()).model
            fitted, judged = (inputs(instance, model, *each, scratch) for each in ((CALIBRATION, 1), (JUDGED, 2)))
            yield Way(hidden=hidden, load=load, checkpoint=checkpoint, fitted=fitted, judged=judged)


def kernels_of(way: Way, model: nn.Module, scratch: Path) -> list[int] | None:
    """Of TensorRT-RTX's half-precision plan: all, attentions by the blocks that the graph tells, and those fused."""
    told = fused(Subject(checkpoint=way.checkpoint, moments=None, judged=way.judged), model, scratch)  # type: ignore[arg-type]
    return None if told is None else [told["kernels"], told["sites"], told["fused"]]


def row_of(instance: Instance, scratch: Path) -> dict[str, Any]:
    """Both ways, and how far they are apart."""
    every, answers = list[dict[str, Any]](), list[dict[str, Tensor]]()
    own: tuple[Site, ...] = ()
    row: dict[str, Any] = {"name": instance.name}
    for way in ways_of(instance, architecture_of(instance), scratch):
        with way.hidden():
            found, moments = sites_of(way.model), way.calibrated(way.fitted)
            own = own or found.every
            both, left, more = matched(own, found.every) if answers else ({site.name for site in own}, {}, {})
            row |= {"sites": len(both), "family_more": dict(left), "program_more": dict(more)}
            row["refused"] = sorted({each.reason for each in found.refused})
            new = {preset: way.reduced(moments, preset, both).model for preset in PRESETS}
            answers.append({"dense": way.answers(way.model), **{name: way.answers(each) for name, each in new.items()}})
            is_attention = any(part in ("qk", "v") for site in own for part, _ in parts_of(site))
            every.append({"kernels": kernels_of(way, new["best"], scratch) if is_attention else None})
            if len(answers) == 1:  # sums in another order round otherwise, which no two ways can agree on
                again = way.reduced(way.calibrated(way.fitted, batch=BATCH // 2), PRESETS[0], both).model
                row["rounding"] = away(way.answers(again), answers[0][PRESETS[0]])
            else:
                export_checkpoint(replace(way.checkpoint, model=new["best"]), scratch / "new.onnx", precision="fp32")
    row["apart"] = {name: away(answers[1][name], expected) for name, expected in answers[0].items()}
    row["loss"] = {name: away(answers[0][name], answers[0]["dense"]) for name in PRESETS}
    return row | {"kernels": [each["kernels"] for each in every]}


def times_of(instance: Instance, scratch: Path) -> dict[str, Any]:
    """Seconds of the processor of a name of its own widths, medians, the two ways in turn: to load a dense model and
    reduce what both find there, and to load what was reduced.
    """
    ways = list(
        ways_of(instance, Architecture(name=instance.name, kwargs={"num_classes": 10, "img_size": SIDE}), scratch)
    )
    taken: dict[tuple[int, str], list[float]] = {}
    calibrations, every = list[Moments](), list[tuple[Site, ...]]()
    for way in ways:
        with way.hidden():
            calibrations.append(way.calibrated(way.fitted))
            every.append(sites_of(way.model).every)
    both = {site.name for site in every[0]}, matched(*every)[0]
    for turn in range(TIMES + 1):
        for number, way in enumerate(ways):
            with way.hidden():
                began = time.process_time()
                reduced = half_of(way.load().model, calibrations[number], "best", both[number]).model
                between = time.process_time()
                save(replace(way.checkpoint, model=reduced), scratch / str(number))
                saved = time.process_time()
                load_checkpoint(scratch / str(number))
                if turn:  # everything is imported by then
                    taken.setdefault((number, "reduce"), []).append(between - began)
                    taken.setdefault((number, "load"), []).append(time.process_time() - saved)
    told = {key: [statistics.median(taken[number, key]) for number in range(2)] for key in ("reduce", "load")}
    return {"name": instance.name, "sites": len(sites_of(ways[0].model).every), "seconds": told}


def table_of(record: Record) -> Iterator[str]:
    yield f"{'name':36} {'sites':>5} {'apart':>8} {'rounding':>8} kernels, attentions, fused"
    for row in record.content.get("rows", ()):
        if "failed" in row:
            yield f"{row['name']:36} {row['failed']:.100}"
            continue
        more = "".join(f" -{count} {part}" for part, count in row["family_more"].items())
        more += "".join(f" +{count} {part}" for part, count in row["program_more"].items())
        apart = max(row["apart"].values())
        yield f"{row['name']:36} {row['sites']:>5} {apart:>8.1e} {row['rounding']:>8.1e} {row['kernels']}{more}"
    for row in record.content.get("full", ()):
        seconds = row.get("seconds", {})
        ratios = ", ".join(f"{key} {own:.2f} and {other:.2f} s" for key, (own, other) in seconds.items())
        yield f"{row['name']:36} {ratios or row['failed']}"


@click.command(help=__doc__)
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--rows", "pattern", default="*", show_default=True, help="Names that fit this pattern.")
@click.option("--full", is_flag=True, help="Seconds of a few names of their own sizes.")
@click.option("--again", is_flag=True, help="Make rows that are there anew.")
def main(output: Path, pattern: str, full: bool, again: bool) -> None:
    torch.set_num_threads(1)
    record = Record(output, KIND, {"versions": versions()})
    instances = {each.name: each for each in INSTANCES if each.source == "timm"}
    part, names, make = ("full", FULL, times_of) if full else ("rows", NAMES.split(), row_of)
    for name in fnmatch.filter(names, pattern):
        if record.has(part, {"name": name}) and not again:
            continue
        with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                row = make(instances[name], Path(scratch))
            except Exception as error:
                row = {"name": name, "failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        record.put(part, row, KEY)
        click.echo(str(row))
    click.echo("\n".join(table_of(record)))


if __name__ == "__main__":
    main()
