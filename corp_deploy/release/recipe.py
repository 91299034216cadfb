"""A recipe as a typed value: its tables, the checks over several tables, and values derived from the tables.

See recipe_tables for the tables, and recipe_file for reading a recipe. Imports no torch.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from corp_deploy.invocation.engine import TargetName
from corp_deploy.invocation.input_choice import InputOptions
from corp_deploy.invocation.option import Record, option, path_from
from corp_deploy.invocation.proof import GateOptions, MetricOptions, ProofOptions
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.invocation.running import BenchOptions
from corp_deploy.invocation.table import BENCH
from corp_deploy.invocation.values import FILE, Repeated
from corp_deploy.proof.custom_metrics import OUTPUTS, MetricRequest, metrics_from_texts
from corp_deploy.reduction.method import NOT_HELD_OUT
from corp_deploy.spec.trusted_code import refuse_untrusted
from ground.errors import BadInput
from ground.quantity import quoted
from perf.gate.rule import Rule

from . import recipe_tables as tables
from .recipe_keys import errors_in_keys
from .targets import ON_CPU, ReleaseTarget, release_target, rules_of

RANGE_SAMPLES = 128


@dataclass(frozen=True, kw_only=True)
class ParityTable(MetricOptions, ProofOptions):
    """The table [parity]: the options of a proof, and commands (`metric`) that compute metrics from the outputs."""

    metric_files: tuple[Path, ...] = option(
        Repeated(each=FILE), (), help="Files that the commands of `metric` name; their digests stand in the record."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metric_files and not self.metric:
            raise BadInput(
                "parity.metric_files has files, but parity.metric has no commands that read them; give both, or none"
            )
        names = [path.name for path in self.metric_files]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise BadInput(
                f"parity.metric_files: two files have the name {twice!r}, by which commands find them; rename one"
            )
        for request in metrics_from_texts(self.metric):
            if request.is_code:
                raise BadInput(
                    f"parity.metric {request.name}: a recipe takes commands, such as 'python score.py {{outputs}}'"
                )

    @property
    def metric_names(self) -> tuple[str, ...]:
        return tuple(request.name for request in metrics_from_texts(self.metric))

    def metrics(self, directory: Path) -> list[str]:
        """Return the commands of `metric` as NAME=COMMAND, with paths of `metric_files` relative to a directory."""
        paths, located = {path.name: path_from(directory, path) for path in self.metric_files}, []
        for request in metrics_from_texts(self.metric):
            words = (paths.get(Path(word).name) or word for word in request.argv)
            located.append(f"{request.name}={shlex.join(words).replace(shlex.quote(OUTPUTS), OUTPUTS)}")
        return located

    def undeclared_files(self, beside: Path, directory: Path) -> list[str]:
        """Return the words of commands that name files beside the recipe which `metric_files` lacks.

        A command is run in `directory`, so that it would not find such a file.
        """
        file_names = {path.name for path in self.metric_files}
        words = (word for request in metrics_from_texts(self.metric) for word in request.argv if OUTPUTS not in word)
        return [
            word
            for word in dict.fromkeys(words)
            if Path(word).name not in file_names and (beside / word).is_file() and not (directory / word).is_file()
        ]


def trusted_metrics(texts: Sequence[str]) -> tuple[MetricRequest, ...]:
    """Parse the commands of parity.metric; raise BadInput for any command unless --trust-code is given."""
    requests = metrics_from_texts(texts)
    for request in requests:
        refuse_untrusted(f"parity.metric: {quoted(request.command)}", to="measure outputs")
    return requests


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A checked recipe with its defaults and absolute paths; the rules of [gate] judge the first of its targets."""

    release: tables.ReleaseTable
    model: tables.ModelTable
    calibration: tables.CalibrationTable
    held_out: tables.HeldOutTable
    reduce: ReduceOptions
    export: tables.ExportTable = field(default_factory=tables.ExportTable)
    parity: ParityTable = field(default_factory=ParityTable)
    bench: BenchOptions = field(default_factory=BenchOptions)
    gate: tables.GateTable = field(default_factory=tables.GateTable)
    samples: tables.SamplesTable = field(default_factory=tables.SamplesTable)
    package: tables.PackageTable = field(default_factory=tables.PackageTable)
    licences: tables.LicencesTable = field(default_factory=tables.LicencesTable)
    target_tables: Mapping[TargetName, tables.TargetTable] = field(
        default_factory=lambda: {"onnxruntime-cpu": tables.TargetTable()}
    )

    def __post_init__(self) -> None:
        if self.proves_on_calibration:
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
        with errors_in_keys(tables.GateTable, "gate"):
            judging = GateOptions(rules=rules, confidence=self.gate.confidence)
            judging.refuse_ignored(judging.non_default)
        if self.reduce.sparse is None and any(table.sparse for table in self.target_tables.values()):
            raise BadInput(
                "targets: sparse asks for sparse kernels, but reduce.sparse for no sparse weights; give both"
            )

    def _refuse_beside_loop(self) -> None:
        loop = "asymmetric" if self.reduce.composes else self.reduce.loop
        if loop is None:
            return
        key = "reduce.effort" if self.reduce.composes else "reduce.closed_loop"
        judges = self.reduce.within is not None or self.proves_on_calibration
        if self.calibration.hold_out is not None and not judges:
            raise BadInput(
                f"calibration.hold_out judges sites that were fitted to moments; {key}: {NOT_HELD_OUT[loop]}; "
                "give one of the two"
            )
        if self.calibration.snapshots:
            raise BadInput(
                f"calibration.snapshots tells how many images a fit to moments needs; {key} fits to the images "
                "themselves; give one of the two"
            )

    def _refuse_unproved(self) -> None:
        """Raise BadInput unless calibration.hold_out is set and its images can prove the result."""
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
                "licences.held_out is the licence of held_out.images, which is not set: the images of "
                "calibration.hold_out have licences.calibration; leave licences.held_out out"
            )

    def _refuse_unjudged_limit(self) -> None:
        """Raise BadInput unless images of calibration.hold_out can judge reduce.within, and others prove the result."""
        limit = self.reduce.limit
        if limit is None:
            return
        if self.proves_on_calibration:
            raise BadInput(
                f"reduce.within = '{limit}' chooses the model on the images that calibration.hold_out leaves out, so "
                "they can't prove it too; give held_out.images"
            )
        if self.calibration.hold_out is None:
            raise BadInput(f"reduce.within = '{limit}' is judged on images held out; give calibration.hold_out = 128")
        if limit.measure == "accuracy":
            raise BadInput(
                f"reduce.within = '{limit}' needs labels of the images that calibration.hold_out leaves out, and a "
                "recipe has no key for these; give an error or agreement"
            )

    def _refuse_idle_threads(self) -> None:
        deaf = [name for name in self.target_tables if not BENCH.variants[name].supports("threads", 1)]
        if self.bench.threads is None or len(deaf) < len(self.target_tables):
            return
        with errors_in_keys(BenchOptions, "bench"):
            BENCH.refuse([("", deaf[0])], {"threads": self.bench.threads})

    def _refuse_idle_system(self) -> None:
        system, method = self.calibration.attention_system, self.reduce.method_asked
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
        return self.release.name

    def trust(self, *, measures: bool) -> dict[str, Any]:
        """Return --trust-paths and, for a command that runs code (`measures`: that of parity.metric), --trust-code."""
        runs = self.model.code is not None or (measures and bool(self.parity.metric))
        return {"trust_paths": True} | ({"trust_code": True} if runs else {})

    @property
    def proves_on_calibration(self) -> bool:
        """True if [held_out] has no images, so that those of calibration.hold_out prove the result."""
        return self.held_out.images is None

    @property
    def judges_sites(self) -> bool:
        """True if `reduce` judges every site by the moments of the images of calibration.hold_out.

        Moments don't judge a closed loop. Merged channels are judged on the images themselves, which is not done if
        these prove the result.
        """
        merges = self.reduce.method_asked.merges or self.reduce.method_asked.folds_heads
        looped = self.reduce.loop is not None or self.reduce.composes
        judged = self.calibration.hold_out is not None and not looped
        return judged and not (merges and self.proves_on_calibration)

    @property
    def proof_images(self) -> InputOptions:
        """The options that select the images which prove the result: those of [held_out] or calibration.hold_out."""
        held_out, calibration = self.held_out, self.calibration
        if not self.proves_on_calibration:
            return InputOptions(images=held_out.images, samples=held_out.samples, seed=held_out.seed)
        drawn = {name: getattr(calibration, name) for name in ("images", "samples", "seed", "hold_out")}
        return InputOptions(**drawn, groups=calibration.grouping)

    @property
    def range_samples(self) -> int:
        """The number of calibration images that the ranges of INT8 and FP8 are computed from."""
        return min(self.export.range_samples or RANGE_SAMPLES, self.calibration.samples or RANGE_SAMPLES)

    @property
    def rules(self) -> tuple[Rule, ...]:
        first = next(iter(self.target_tables))
        return rules_of("gate.fail_if", self.gate.rules, first, self.bench.batches, self.parity.metric_names)

    @property
    def served_on_cpu(self) -> TargetName | None:
        """The first target on the CPU, whose runtime the server's CPU variant uses; None without such a target."""
        return next((target.name for target in self.targets if target.name in ON_CPU), None)

    @property
    def targets(self) -> tuple[ReleaseTarget, ...]:
        return tuple(
            release_target(name, table, self.export, self.bench.batches, self.parity.metric_names)
            for name, table in self.target_tables.items()
        )


SECTIONS: Mapping[str, type[Record]] = {
    name: kind for name, kind in get_type_hints(Recipe).items() if name != "target_tables"
}
"""The record classes of a recipe's tables by the table's name, without [targets]."""
