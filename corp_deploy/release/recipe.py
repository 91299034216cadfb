"""A release as a typed value: a table of the recipe is a struct, rules over several keys are held where they meet.

The structs are what a recipe says, key by key; what follows from it is a property. See recipe_file for reading one.
Imports no torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from corp_deploy.families.preprocessing import Preprocessing
from corp_deploy.invocation.honours import Axis
from corp_deploy.invocation.table import ATTENTION, BENCH, LOOP, PRESET
from corp_deploy.reduction.method import (
    DEFAULT_RIDGE_REL,
    NOT_HELD_OUT,
    LoopName,
    Method,
    loop_from,
    method_from_preset,
)
from export.engine.options import BatchProfile, BuildOptions
from ground.errors import BadInput
from perf.gate.rule import Rule, rule_from_text

from . import recipe_values as values

TargetName = Literal["onnxruntime-cpu", "onnxruntime-cuda", "tensorrt", "tensorrt-rtx"]
ENGINES: tuple[TargetName, ...] = ("tensorrt", "tensorrt-rtx")


class Table(msgspec.Struct, frozen=True):
    """Some keys and their values."""


class ReleaseTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: values.Text


class ModelTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model` is a directory as an absolute path, or a timm name, which goes with `weights`."""

    model: values.Text
    weights: values.Location | None = None
    kwargs: values.Arguments = msgspec.field(default_factory=dict)
    ema: values.Flag | None = None
    mean: values.Means | None = None
    std: values.Deviations | None = None
    crop_pct: values.ShareKept | None = None
    interpolation: values.Interpolation | None = None
    crop_mode: values.CropMode | None = None

    def __post_init__(self) -> None:
        try:
            json.dumps(self.kwargs)
        except TypeError:
            raise BadInput(f"model.kwargs is {self.kwargs!r:.200}, expected no dates and times in it") from None

    @property
    def directory(self) -> Path | None:
        path = Path(self.model)
        return path if path.is_absolute() else None

    @property
    def preprocessing(self) -> Preprocessing:
        """What of the preprocessing is set."""
        return Preprocessing(
            mean=self.mean,
            std=self.std,
            crop_pct=self.crop_pct,
            interpolation=self.interpolation,
            crop_mode=self.crop_mode,
        )


class CalibrationTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    images: values.Location
    samples: values.Images | None = None
    seed: values.Seed = 0
    batch_size: values.Batch = 32
    device: values.Device = "cpu"
    workers: values.Workers = 0
    max_bad: values.BadImages = 0
    hold_out: values.Images | None = None
    attention_system: values.AttentionSystem | None = None


class HeldOutTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    images: values.Location
    labels: values.Location | None = None
    samples: values.Images | None = None
    seed: values.Seed = 0


class ReduceTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares to remove (`mlp`, `attn`) or to keep of the whole model (`macs`, `params`), and how."""

    preset: values.Preset = "best"
    mlp: values.ShareRemoved | None = None
    attn: values.ShareRemoved | None = None
    macs: values.ShareKept | None = None
    params: values.ShareKept | None = None
    select_mlp: values.SelectMlp | None = None
    select_head: values.SelectHead | None = None
    heads: values.Heads = "padded"
    align_mlp: values.Multiple = 64
    align_head: values.Multiple = 16
    ridge: values.Ridge = DEFAULT_RIDGE_REL
    closed_loop: values.ClosedLoop = False
    allow_partial: values.Flag = False
    reads: values.Reads | None = None

    def __post_init__(self) -> None:
        self._refuse_contradictions()
        asked = {"attn": self.attn, "heads": None if self.heads == "padded" else self.heads, "reads": self.reads}
        for axis, way in self.ways:
            _refuse_ignored("[reduce]", axis, way, asked)
        try:
            _ = self.method
        except ValueError as error:
            raise BadInput(f"[reduce]: {error}") from None

    def _refuse_contradictions(self) -> None:
        budgets = [name for name, share in (("macs", self.macs), ("params", self.params)) if share is not None]
        if len(budgets) > 1:
            raise BadInput("[reduce] has macs and params; give one budget")
        if budgets and (self.mlp or self.attn):
            raise BadInput(f"[reduce] has a budget ({budgets[0]}) and sparsities (mlp, attn); give one of the two")
        if not budgets and self.mlp is None and not self.touches_attention:
            raise BadInput(
                "[reduce] asks for nothing; give mlp or attn a share to remove (0 keeps the widths), or a budget"
            )
        if budgets and self.preset != "best":
            raise BadInput(f"reduce.{budgets[0]} needs preset best, got {self.preset!r}")

    @property
    def has_budget(self) -> bool:
        return self.macs is not None or self.params is not None

    @property
    def touches_attention(self) -> bool:
        return self.has_budget or self.attn is not None or self.heads == "auto"

    @property
    def loop(self) -> LoopName | None:
        return loop_from(self.closed_loop)

    @property
    def looks_at_images(self) -> bool:
        """Whether the reduction looks at the calibration images beside their moments."""
        return self.has_budget or self.heads == "auto" or self.loop is not None or self.method.merges

    @property
    def ways(self) -> tuple[tuple[Axis, str], ...]:
        """What is at work in `reduce` and may not honour an option."""
        touched = "reduced" if self.touches_attention else "kept"
        return (PRESET, self.preset), (ATTENTION, touched), (LOOP, self.loop or "open")

    @property
    def method(self) -> Method:
        """How sites are reduced; heads = auto starts from padded ones."""
        return method_from_preset(
            self.preset,
            mlp_sparsity=self.mlp,
            attention_sparsity=self.attn,
            geometry="padded" if self.heads == "auto" else self.heads,
            align_hidden=self.align_mlp,
            align_head=self.align_head,
            ridge_rel=self.ridge,
            mlp_selection=self.select_mlp,
            qk_selection=self.select_head,
        )


class ExportTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    precisions: values.Precisions = ("fp32", "fp16")
    keep_fp32: values.Texts = ()

    def __post_init__(self) -> None:
        if self.keep_fp32 and "mixed" not in self.precisions:
            raise BadInput("export.keep_fp32 is for precision mixed, which export.precisions does not have")
        if "mixed" in self.precisions and not self.keep_fp32:
            raise BadInput("precision mixed needs export.keep_fp32, such as ['blocks.7.attn']; else choose fp16")


class ParityTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    batches: values.Batches = (1, 7, 32)
    min_agreement: values.Share | None = None
    max_error: values.RelativeError | None = None
    half_factor: values.Factor = 4.0


class BenchTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    batches: values.Batches = (1, 8, 32)
    time_limit_s: values.Seconds = 20.0
    half_width: values.ShareKept = 0.01
    block_ms: values.Milliseconds = 25.0
    min_rounds: values.Rounds = 16
    threads: values.Threads | None = None


class GateTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    fail_if: values.Texts = ()


class SamplesTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    count: values.Images = 16


class PackageTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: values.ServedName | None = None
    labels: values.Location | None = None


class TargetTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of [targets], which may leave out what follows from the other tables."""

    precision: values.Precision | None = None
    batch: values.Text | None = None
    sms: values.Texts = ()
    fail_if: values.Texts = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One place where the model is to run; `profile` and `sms` shape engines only. `rules` are judged there alone."""

    name: TargetName
    precision: str
    profile: BatchProfile
    sms: tuple[str, ...]
    rules: tuple[Rule, ...]

    @property
    def is_engine(self) -> bool:
        return self.name in ENGINES


class Recipe(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checked recipe, defaults filled in and paths absolute. The first target is the one that the gate asks about."""

    release: ReleaseTable
    model: ModelTable
    calibration: CalibrationTable
    held_out: HeldOutTable
    reduce: ReduceTable
    export: ExportTable = ExportTable()
    parity: ParityTable = ParityTable()
    bench: BenchTable = BenchTable()
    gate: GateTable = GateTable()
    samples: SamplesTable = SamplesTable()
    package: PackageTable = PackageTable()
    target_tables: dict[TargetName, TargetTable] = msgspec.field(
        default_factory=lambda: {"onnxruntime-cpu": TargetTable()}, name="targets"
    )

    def __post_init__(self) -> None:
        if self.calibration.hold_out is not None and self.reduce.loop is not None:
            raise BadInput(
                f"calibration.hold_out judges sites that were fitted to moments; reduce.closed_loop: "
                f"{NOT_HELD_OUT[self.reduce.loop]}; give one of the two"
            )
        if self.package.name is not None and "fp32" not in self.export.precisions:
            raise BadInput("package.name asks for a model repository, which needs fp32 among export.precisions")
        self._refuse_idle_threads()
        self._refuse_idle_system()
        _ = self.targets, self.rules

    def _refuse_idle_threads(self) -> None:
        """Threads are of the targets that have them; a recipe's other targets don't ask for any."""
        deaf = [name for name in self.target_tables if not BENCH.ways[name].takes("threads", 1)]
        if len(deaf) == len(self.target_tables):
            _refuse_ignored("[bench]", BENCH, deaf[0], {"threads": self.bench.threads})

    def _refuse_idle_system(self) -> None:
        """Raise BadInput for a per-image system that nothing needs, or that leaves out what the reduction keeps."""
        system, method = self.calibration.attention_system, self.reduce.method
        got = f"calibration.attention_system is {system!r}"
        if system is not None and not method.needs_attention_system:
            raise BadInput(
                f"{got}, but this reduction needs no such system; leave it out, or give preset corp and attn"
            )
        if system == "kept" and not method.attention_sparsity:
            raise BadInput(f"{got}, but reduce.attn = 0 keeps every dimension; expected 'whole', or attn above 0")
        if system == "kept" and method.qk_selection != "energy":
            raise BadInput(
                f"{got}, which is taken for the dimensions of most logit energy, but reduce.select_head is "
                f"{method.qk_selection!r}; expected 'whole', or select_head 'energy'"
            )

    @property
    def name(self) -> str:
        return self.release.name

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The gate's own, judged on the first target."""
        return _rules("gate.fail_if", self.gate.fail_if, self.bench.batches)

    @property
    def targets(self) -> tuple[Target, ...]:
        """In the order in which they are written."""
        return tuple(
            _target(name, table, self.export.precisions, self.bench.batches)
            for name, table in self.target_tables.items()
        )


def _refuse_ignored(where: str, axis: Axis, way: str, options: Mapping[str, Any]) -> None:
    """Raise BadInput for an option that is set, which the way at work would ignore."""
    try:
        axis.refuse([("", way)], {name: value for name, value in options.items() if value is not None})
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


def _rules(where: str, texts: tuple[str, ...], batches: tuple[int, ...]) -> tuple[Rule, ...]:
    try:
        rules = tuple(map(rule_from_text, texts))
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None
    for rule in rules:
        if rule.batch is not None and rule.batch not in batches:
            raise BadInput(f"{where}: {rule.text!r} asks for batch {rule.batch}, bench.batches has {[*batches]}")
    return rules


def _target(
    name: TargetName, table: TargetTable, precisions: tuple[values.Precision, ...], batches: tuple[int, ...]
) -> Target:
    where = f"targets.{name}"
    half = "fp16" if "fp16" in precisions else precisions[-1]
    precision = table.precision or (precisions[0] if name == "onnxruntime-cpu" else half)
    if precision not in precisions:
        raise BadInput(f"{where}.precision is {precision!r}, but export.precisions has {[*precisions]}")
    rules = _rules(f"{where}.fail_if", table.fail_if, batches)
    if any(rule.wants_baseline for rule in rules):
        raise BadInput(f"{where}.fail_if: the baseline is one of the first target; put this rule under [gate]")
    profile = _profile(where, name, table, batches)
    return Target(name=name, precision=precision, profile=profile, sms=table.sms, rules=rules)


def _profile(where: str, name: TargetName, table: TargetTable, batches: tuple[int, ...]) -> BatchProfile:
    """The batch sizes that a target's engine takes; of ONNX Runtime, which takes any, those that are measured."""
    if name not in ENGINES and (table.batch or table.sms):
        raise BadInput(f"{where}: batch and sms shape engines; leave them out for {name}")
    try:
        profile = BatchProfile.from_text(table.batch or f"1:{max(batches)}:{max(batches)}")
        if name in ENGINES:
            BuildOptions(backend=name, profiles=(profile,), sms=table.sms)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None
    outside = [batch for batch in batches if not profile.smallest <= batch <= profile.largest]
    if name in ENGINES and outside:
        raise BadInput(f"{where}.batch is {profile}, but bench.batches asks for {outside[0]}")
    return profile
