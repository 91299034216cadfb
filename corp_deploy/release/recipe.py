"""A release as a typed value: the tables of a recipe together, and what follows from them.

See recipe_tables for the tables, recipe_file for reading one. Imports no torch.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from corp_deploy.invocation.engine import TargetName
from corp_deploy.invocation.inputs import InputOptions
from corp_deploy.invocation.proof import GateOptions
from corp_deploy.invocation.table import BENCH
from corp_deploy.reduction.method import NOT_HELD_OUT
from export.engine.options import BatchProfile, BuildOptions
from ground.errors import BadInput
from ground.precision import BFLOAT16, FLOAT8, MIXED, QUANTISED, type_by_name
from perf.gate.rule import Rule, rule_from_text

from .recipe_parity import ParityTable
from .recipe_record import Table, record_of, told_at
from .recipe_tables import (
    BenchTable,
    CalibrationTable,
    ExportTable,
    GateTable,
    HeldOutTable,
    LicencesTable,
    ModelTable,
    PackageTable,
    ReduceTable,
    ReleaseTable,
    SamplesTable,
    TargetTable,
)

ENGINES: tuple[TargetName, ...] = ("tensorrt", "tensorrt-rtx")
ON_CPU: tuple[TargetName, ...] = ("onnxruntime-cpu", "openvino")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One place where the model is to run; `profile`, `sms` and `sparse` shape engines only. `rules` are judged there
    alone.

    `rest`: of a quantised precision the one that it rests on, which it has to be faster than; None of others.
    """

    name: TargetName
    precision: str
    profile: BatchProfile
    sms: tuple[str, ...]
    sparse: bool
    rules: tuple[Rule, ...]
    rest: str | None = None

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
    licences: LicencesTable = LicencesTable()
    target_tables: dict[TargetName, TargetTable] = msgspec.field(
        default_factory=lambda: {"onnxruntime-cpu": TargetTable()}, name="targets"
    )

    def __post_init__(self) -> None:
        if self.proves_on_own:
            self._refuse_unproved()
        self._refuse_unjudged_limit()
        self._refuse_beside_loop()
        if self.calibration.groups is not None and self.calibration.group_labels is not None:
            raise BadInput("calibration.groups and calibration.group_labels both say what belongs together; give one")
        if self.package.name is not None and "fp32" not in self.export.precisions:
            raise BadInput("package.name asks for a model repository, which needs fp32 among export.precisions")
        self._refuse_idle_threads()
        self._refuse_idle_system()
        rules = [rule.text for rules in (self.rules, *(target.rules for target in self.targets)) for rule in rules]
        record_of(GateOptions, self.gate, "gate", rules=rules)
        if self.reduce.sparse is None and any(table.sparse for table in self.target_tables.values()):
            raise BadInput(
                "targets: sparse asks for sparse kernels, but reduce.sparse for no sparse weights; give both"
            )

    def _refuse_beside_loop(self) -> None:
        loop = "asymmetric" if self.reduce.choice.composes else self.reduce.choice.loop
        if loop is None:
            return
        key = "reduce.effort" if self.reduce.choice.composes else "reduce.closed_loop"
        judges = self.reduce.within is not None or self.proves_on_own
        if self.calibration.hold_out is not None and not judges:
            raise BadInput(
                f"calibration.hold_out judges sites that were fitted to moments; {key}: {NOT_HELD_OUT[loop]}; "
                "give one of the two"
            )
        if self.calibration.snapshots is not None:
            raise BadInput(
                f"calibration.snapshots tells how many images a fit to moments needs; {key} fits to the images "
                "themselves; give one of the two"
            )

    def _refuse_unproved(self) -> None:
        """Raise BadInput where no image proves the result, and for what would look at those images beside that."""
        if self.calibration.hold_out is None:
            raise BadInput(
                "held_out.images is missing; write it under [held_out], or hold_out = 128 under [calibration] to prove "
                "the result on so many of the calibration images, which nothing is then fitted to"
            )
        if self.export.quantised:
            raise BadInput(
                f"export.precisions has {self.export.quantised[0]}, whose ranges are computed from any calibration "
                "images, also of those that calibration.hold_out leaves out to prove the result; give held_out.images"
            )
        if self.licences.held_out is not None:
            raise BadInput(
                "licences.held_out is of held_out.images, and there are none: the images that calibration.hold_out "
                "leaves out are those of licences.calibration; leave it out"
            )

    def _refuse_unjudged_limit(self) -> None:
        """A limit is judged on what the calibration holds out: [held_out] proves the model that was chosen."""
        limit = self.reduce.choice.limit
        if limit is None:
            return
        if self.proves_on_own:
            raise BadInput(
                f"reduce.within = '{limit}' chooses the model on the images that calibration.hold_out leaves out, so "
                "they can't prove it too; give held_out.images"
            )
        if self.calibration.hold_out is None:
            raise BadInput(f"reduce.within = '{limit}' is judged on images held out; give calibration.hold_out = 128")
        if limit.measure == "accuracy":
            raise BadInput(
                f"reduce.within = '{limit}' needs labels of the images that calibration.hold_out leaves out, which a "
                "recipe has none of; give an error or agreement"
            )

    def _refuse_idle_threads(self) -> None:
        """Threads are of the targets that have them; a recipe's other targets don't ask for any."""
        deaf = [name for name in self.target_tables if not BENCH.variants[name].supports("threads", 1)]
        if self.bench.threads is None or len(deaf) < len(self.target_tables):
            return
        with told_at("[bench]"):
            BENCH.refuse([("", deaf[0])], {"threads": self.bench.threads})

    def _refuse_idle_system(self) -> None:
        """Raise BadInput for a per-image system that nothing needs, or that leaves out what the reduction keeps."""
        system, method = self.calibration.attention_system, self.reduce.choice.method_asked
        value = f"calibration.attention_system is {system!r}"
        if system is not None and not method.needs_attention_system:
            raise BadInput(
                f"{value}, but this reduction needs no such system; leave it out, or give preset corp and attn"
            )
        if system == "kept" and not method.attention_sparsity:
            raise BadInput(f"{value}, but reduce.attn = 0 keeps every dimension; expected 'whole', or attn above 0")
        if system == "kept" and method.qk_selection != "energy":
            raise BadInput(
                f"{value}, which is taken for the dimensions of most logit energy, but reduce.select_head is "
                f"{method.qk_selection!r}; expected 'whole', or select_head 'energy'"
            )

    @property
    def name(self) -> str:
        name: str = self.release.name
        return name

    def trust(self, *, measures: bool) -> dict[str, Any]:
        """What a release of this recipe is told: its inputs lie elsewhere, and it may run code of its user's;
        `measures`: whether commands of the recipe are run.
        """
        runs = self.model.code is not None or (measures and bool(self.parity.metric))
        return {"trust_paths": True} | ({"trust_code": True} if runs else {})

    @property
    def proves_on_own(self) -> bool:
        """Whether what the calibration holds out proves the result."""
        return self.held_out.images is None

    @property
    def judges_sites(self) -> bool:
        """Whether moments of held-out images judge every site. What is merged is judged on the images themselves, which
        are not shown to the reduction where they prove the result.
        """
        merges = self.reduce.choice.method_asked.merges or self.reduce.choice.method_asked.folds_heads
        looped = self.reduce.choice.loop is not None or self.reduce.choice.composes
        judged = self.calibration.hold_out is not None and not looped
        return judged and not (merges and self.proves_on_own)

    @property
    def proof_images(self) -> InputOptions:
        """The images that a release is proved on: those that a calibration by the same values leaves out, or others."""
        held_out, calibration = self.held_out, self.calibration
        if not self.proves_on_own:
            return InputOptions(images=held_out.images, samples=held_out.samples, seed=held_out.seed)
        drawn = {name: getattr(calibration, name) for name in ("images", "samples", "seed", "hold_out")}
        return InputOptions(**drawn, groups=calibration.grouping)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The gate's own, judged on the first target."""
        return _rules("gate.fail_if", self.gate.fail_if, self.bench.batches)

    @property
    def served_on_cpu(self) -> TargetName | None:
        """The first target on the CPU, which a server's CPU model is made for; None where there is none."""
        return next((target.name for target in self.targets if target.name in ON_CPU), None)

    @property
    def targets(self) -> tuple[Target, ...]:
        """In the order in which they are written."""
        return tuple(
            _target(name, table, self.export, self.bench.batches) for name, table in self.target_tables.items()
        )


def _rules(where: str, texts: tuple[str, ...], batches: tuple[int, ...]) -> tuple[Rule, ...]:
    with told_at(where):
        rules = tuple(map(rule_from_text, texts))
    for rule in rules:
        if rule.batch is not None and rule.batch not in batches:
            raise BadInput(f"{where}: {rule.text!r} asks for batch {rule.batch}, bench.batches has {[*batches]}")
    return rules


def _target(name: TargetName, table: TargetTable, export: ExportTable, batches: tuple[int, ...]) -> Target:
    where, precisions = f"targets.{name}", export.precisions
    fp16 = "fp16" if "fp16" in precisions else precisions[-1]
    precision = table.precision or (precisions[0] if name in ON_CPU else fp16)
    if precision not in precisions:
        raise BadInput(f"{where}.precision is {precision!r}, but export.precisions has {[*precisions]}")
    float_type = type_by_name(precision)
    if name == "onnxruntime-cpu" and float_type in (BFLOAT16, FLOAT8):
        raise BadInput(
            f"{where}: ONNX Runtime's CPU kernels have no arithmetic in {float_type.name}, got precision {precision!r}"
            "; name another of export.precisions, such as fp32"
        )
    if name == "openvino" and (precision in MIXED or precision in QUANTISED):
        raise BadInput(
            f"{where}: OpenVINO computes a whole graph in one precision here, got {precision!r}; name fp32, fp16 or "
            "bf16 of export.precisions"
        )
    rules = _rules(f"{where}.fail_if", table.fail_if, batches)
    if any(rule.wants_baseline for rule in rules):
        raise BadInput(f"{where}.fail_if: the baseline is one of the first target; put this rule under [gate]")
    return Target(
        name=name,
        precision=precision,
        profile=_profile(where, name, table, batches),
        sms=table.sms,
        sparse=table.sparse,
        rules=rules,
        rest=export.resting_on if precision in QUANTISED else None,
    )


def _profile(where: str, name: TargetName, table: TargetTable, batches: tuple[int, ...]) -> BatchProfile:
    """The batch sizes that a target's engine takes; of a graph, which takes any, those that are measured."""
    if name not in ENGINES and (table.batch or table.sms or table.sparse):
        raise BadInput(f"{where}: batch and sms shape engines, as sparse does; leave them out for {name}")
    with told_at(where):
        profile = BatchProfile.from_text(table.batch or f"1:{max(batches)}:{max(batches)}")
        if name in ENGINES:
            BuildOptions(backend=name, profiles=(profile,), sms=table.sms, sparse=table.sparse)
    outside = [batch for batch in batches if not profile.smallest <= batch <= profile.largest]
    if name in ENGINES and outside:
        raise BadInput(f"{where}.batch is {profile}, but bench.batches asks for {outside[0]}")
    return profile
