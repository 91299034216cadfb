"""The targets of a recipe: the runtimes that its model is made for, their rules, and what they need of a machine."""

import importlib.util
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from corp_deploy.invocation.engine import TargetName
from corp_deploy.invocation.table import BENCH
from export.engine.options import BatchProfile, BuildOptions
from ground.errors import BadInput
from ground.gpu import missing_gpu
from ground.precision import BFLOAT16, FLOAT8, MIXED, QUANTISED, type_by_name
from perf.gate.evidence import require_figure
from perf.gate.rule import OF_ENGINES, Rule, rule_from_text
from perf.timing.watch import environment, watching

from .recipe_keys import errors_at
from .recipe_tables import ExportTable, TargetTable

SUBJECTS = ("dense", "reduced")
ENGINES: tuple[TargetName, ...] = ("tensorrt", "tensorrt-rtx")
ON_CPU: tuple[TargetName, ...] = ("onnxruntime-cpu", "openvino")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseTarget:
    """A runtime that the model is made for; `profile`, `sms` and `sparse` are for engines only.

    `rules` are judged on this target alone. If `precision` is INT8 or FP8, `rest` is the float precision of the layers
    outside the quantised ones, and the quantised model has to be faster than the model in `rest`; otherwise it is None.
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


def rules_of(
    where: str, texts: Sequence[str], target: TargetName, batches: Sequence[int], metrics: tuple[str, ...]
) -> tuple[Rule, ...]:
    """Parse the rules of the key `where`; raise BadInput for a figure that neither the target nor `metrics` have."""
    with errors_at(where):
        rules = tuple(map(rule_from_text, texts))
        for rule in rules:
            require_figure(rule, SUBJECTS, "a release")
    for rule in rules:
        asks = f"{where}: {rule.text!r} asks for"
        if rule.batch is not None and rule.batch not in batches:
            raise BadInput(f"{asks} batch {rule.batch}, bench.batches has {[*batches]}")
        if rule.is_own and rule.metric not in metrics:
            raise BadInput(
                f"{asks} a measure of your own, parity.metric has {[*metrics]}; write metric = "
                f'["{rule.metric}=COMMAND {{outputs}}"] under [parity]'
            )
        if not rule.is_own and rule.metric in OF_ENGINES and target not in ENGINES:
            raise BadInput(
                f"{asks} a figure of engines only, and {target} runs the graph; leave it out, or put it under the "
                "table of an engine, such as [targets.tensorrt]"
            )
    return rules


def release_target(
    name: TargetName, table: TargetTable, export: ExportTable, batches: Sequence[int], metrics: tuple[str, ...]
) -> ReleaseTarget:
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
    rules = rules_of(f"{where}.fail_if", table.rules, name, batches, metrics)
    if any(rule.wants_baseline for rule in rules):
        raise BadInput(f"{where}.fail_if: the baseline is one of the first target; put this rule under [gate]")
    return ReleaseTarget(
        name=name,
        precision=precision,
        profile=_profile(where, name, table, batches),
        sms=table.sm,
        sparse=table.sparse,
        rules=rules,
        rest=export.rest if precision in QUANTISED else None,
    )


def _profile(where: str, name: TargetName, table: TargetTable, batches: Sequence[int]) -> BatchProfile:
    if name not in ENGINES and (table.batch or table.sm or table.sparse):
        raise BadInput(f"{where}: batch and sms shape engines, as sparse does; leave them out for {name}")
    with errors_at(where):
        profile = BatchProfile.from_text(table.batch or f"1:{max(batches)}:{max(batches)}")
        if name in ENGINES:
            BuildOptions(backend=name, profiles=(profile,), sms=table.sm, sparse=table.sparse)
    outside = [batch for batch in batches if not profile.smallest <= batch <= profile.largest]
    if name in ENGINES and outside:
        raise BadInput(f"{where}.batch is {profile}, but bench.batches asks for {outside[0]}")
    return profile


OPENVINO = "pip install 'corp-deploy[openvino]'"
LIBRARY = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


def _missing_library(target: ReleaseTarget) -> str | None:
    return None if importlib.util.find_spec(LIBRARY[target.name]) else f"{target.name} is not installed here"


def missing_to_build(target: ReleaseTarget) -> str | None:
    """Return the reason why this machine can't build the target's engines, None if it can."""
    return _missing_library(target) or (None if target.name == "tensorrt-rtx" else missing_gpu())


def missing_to_run(target: ReleaseTarget) -> str | None:
    if target.is_engine:
        return _missing_library(target) or missing_gpu()
    if target.name == "openvino":
        return None if importlib.util.find_spec("openvino") else f"openvino is not installed here; {OPENVINO}"
    if importlib.util.find_spec("onnxruntime") is None:
        return "onnxruntime is not installed here; pip install 'corp-deploy[cpu]'"
    if target.name == "onnxruntime-cpu":
        return None
    import onnxruntime

    providers = onnxruntime.get_available_providers()
    return (
        None if "CUDAExecutionProvider" in providers else "onnxruntime here has no CUDA provider (onnxruntime-gpu has)"
    )


OF_MACHINE = ("machine", "cpu", "cpu_count", "gpu", "driver")
RUNTIMES = {
    "onnxruntime-cuda": ("onnxruntime_gpu",),
    "tensorrt": ("tensorrt",),
    "tensorrt-rtx": ("tensorrt_rtx",),
}


def machine_facts(target: ReleaseTarget) -> dict[str, Any]:
    """Return the processor, GPU, driver and runtime versions on which a target's times depend."""
    with nullcontext((None, None)) if target.name in ON_CPU else watching() as (_, gpu):
        here = environment(gpu)
    return {key: here[key] for key in (*OF_MACHINE, *RUNTIMES.get(target.name, ())) if here[key] is not None}


def run_options(target: ReleaseTarget, threads: int | None) -> dict[str, Any]:
    """Return the options of `bench`, by name, with which a target's engines or graphs run in its own runtime."""
    options: dict[str, Any] = {
        "onnxruntime-cpu": {"provider": "cpu", "threads": threads},
        "onnxruntime-cuda": {"provider": "cuda", "threads": threads},
        "openvino": {"backend": "openvino", "dtype": target.precision, "threads": threads},
    }.get(target.name, {"mode": "cuda_graph", "threads": threads})
    return BENCH.supported(target.name, {name: value for name, value in options.items() if value is not None})
