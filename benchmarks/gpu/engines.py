"""TensorRT-RTX engines that are built without a GPU, copied in parts, and timed on a GPU, dense against reduced.

    python -m benchmarks.gpu.engines --output build/engines           # without a GPU: FP16 plans
    python -m benchmarks.gpu.run --output out --only engines --engines build/engines       # on the GPU

A plan is cut into parts of at most 48 MB, which can be copied one after the other; a plan with absent parts has a row
with this reason. `--small` builds tiny models. A run without a GPU joins and checks their plans and times their graphs
in ONNX Runtime, which only tests the scripts.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu import models
from benchmarks.gpu.record import Record, Row, Task
from benchmarks.gpu.setting import Setting
from benchmarks.real.search import Schedules
from corp_deploy.families import traced_model
from corp_deploy.invocation.merging import MergingChoice
from corp_deploy.invocation.running import RunOptions
from corp_deploy.planning.request import merging_from_choice
from corp_deploy.proof.speed import time_models
from corp_deploy.spec.widths import HeadGeometry
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.views.speed import speed_record
from export.engine.build import build_engine
from export.engine.options import BatchProfile, BuildOptions
from ground.errors import Missing
from ground.files import sha256_of_file, write_json
from perf.timing.laps import Plan

SPARSITY, SHARE = 0.5, 0.6
PART_BYTES = 48_000_000
BATCHES = (1, 8, 32)
VARIANTS = ("dense", "square", "padded", "merged")
NAMES = ("DeiT-B", "DeiT-H")
FACTS = "engine.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The folder of one engine: its parts and its facts."""

    folder: Path
    model: str
    variant: str

    @property
    def at(self) -> Path:
        return self.folder / f"{self.model}-{self.variant}"

    @property
    def graph(self) -> Path:
        return self.at / "model.onnx"

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts of the build. Raises Missing if it was not built or not copied."""
        path = self.at / FACTS
        if not path.is_file():
            raise Missing(f"{path}: no such engine; python -m benchmarks.gpu.engines builds it on any machine")
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return facts

    def joined(self) -> Path:
        """Join the parts to a plan. Raises Missing if parts are absent or damaged."""
        facts, path = self.facts, self.at / "model.plan"
        parts = [self.at / f"part.{number:03}" for number in range(facts["parts"])]
        if absent := [part for part in parts if not part.is_file()]:
            raise Missing(f"{absent[0]}: {len(absent)} of {len(parts)} parts are not here")
        with path.open("wb") as plan:
            for part in parts:
                plan.write(part.read_bytes())
        if sha256_of_file(path) != facts["sha256"]:
            raise Missing(f"{path}: its parts are those of another plan; carry them over again")
        return path


def checkpoint_of(built: Built, setting: Setting) -> Checkpoint:
    """Return the model with random weights, dense, at half its widths, or with merged tokens."""
    model = models.dense(built.model, setting)
    if built.variant == "merged":
        tokens = Schedules(model).of("each", 0.9 if setting.small else SHARE)
        model = traced_model.with_merging(model, merging_from_choice(MergingChoice(merge_tokens=tokens), model))
    elif built.variant != "dense":
        geometry: HeadGeometry = "square" if built.variant == "square" else "padded"
        model = models.reduced(model, SPARSITY, geometry, setting)
    return Checkpoint(model=model, architecture=models.architecture(built.model, setting), lineage={})


def build(built: Built, sm: str, setting: Setting) -> None:
    """Build one plan for a target, write it in parts, and write its facts."""
    built.at.mkdir(parents=True, exist_ok=True)
    checkpoint, half = checkpoint_of(built, setting), built.at / "model.fp16.onnx"
    export_checkpoint(checkpoint, half, precision="fp16")
    if setting.small:
        export_checkpoint(checkpoint, built.graph, precision="fp32")
    profile = BatchProfile(smallest=BATCHES[0], tuned=BATCHES[1], largest=BATCHES[-1])
    engine = build_engine(half, BuildOptions(backend="tensorrt-rtx", profiles=(profile,), sms=(sm,)))
    half.unlink()
    parts = [engine.plan[start : start + PART_BYTES] for start in range(0, len(engine.plan), PART_BYTES)]
    for number, part in enumerate(parts):
        (built.at / f"part.{number:03}").write_bytes(part)
    (built.at / "model.plan").write_bytes(engine.plan)
    record = engine.record
    facts = {
        "model": built.model,
        "variant": built.variant,
        "sm": sm,
        "version": record.library_version,
        "macs": models.facts(checkpoint.model)["macs"],
        "parts": len(parts),
        "plan_bytes": record.plan_bytes,
        "sha256": sha256_of_file(built.at / "model.plan"),
        "kernels": record.kernels,
        "fused_attention": record.fused_attention,
        "attention_sites": len(record.attention_sites),
    }
    (built.at / "model.plan").unlink()
    write_json(built.at / FACTS, facts)


def every(setting: Setting) -> Iterator[Built]:
    """Yield the engines of every model, the dense one first."""
    for name in setting.models if setting.small else NAMES:
        yield from (Built(folder=setting.engines, model=name, variant=variant) for variant in VARIANTS)


def timed(built: Built, setting: Setting) -> Row:
    """Time one engine against the dense one of the same model, at each batch size."""
    dense = Built(folder=built.folder, model=built.model, variant="dense")
    plans = dense.joined(), built.joined()
    row = {"row": "engine", **built.facts, "dense": dense.facts}
    plan = Plan(time_limit_s=0.2 if setting.small else 8.0)
    if setting.device == "cuda":
        running = RunOptions(device="cuda", mode="cuda_graph")
    elif setting.small:
        plans, running = (dense.graph, built.graph), RunOptions()
    else:
        raise Missing("engines run on a GPU; this run was asked for the CPU")
    return row | speed_record(time_models(*plans, batches=BATCHES, plan=plan, running=running))


def tasks(setting: Setting, record: Record) -> list[Task]:
    """Return a task for each reduced engine, timed against the dense one."""

    def estimate_s(built: Built) -> float:
        return 40.0 if (built.at / FACTS).is_file() and not setting.small else 0.0

    return [
        Task(key=f"{each.model} {each.variant}", estimate_s=estimate_s(each), run=partial(timed, each, setting))
        for each in every(setting)
        if each.variant != "dense"
    ]


@click.command(help=__doc__)
@click.option("--output", "-o", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--sm", default="portable", show_default=True, help="The target, as `build --sm` takes it.")
@click.option("--small", is_flag=True, help="Tiny models, to see that everything runs.")
def main(output: Path, sm: str, small: bool) -> None:
    """Build every engine that is not there."""
    setting = Setting(device="cpu", small=small, engines=output)
    for built in every(setting):
        if not (built.at / FACTS).is_file():
            build(built, sm, setting)
        facts = built.facts
        fused = f"{facts['fused_attention']} of {facts['attention_sites']} attentions fused"
        click.echo(f"{built.at}: {facts['parts']} parts, {facts['plan_bytes'] / 1e6:.0f} MB, {fused}")


if __name__ == "__main__":
    main()
