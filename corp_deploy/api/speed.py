"""The function corp_deploy.bench."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from corp_deploy.invocation.running import BenchFiles, BenchOptions, FedOptions, TextFed
from corp_deploy.proof.engine_trust import trusting_engines
from corp_deploy.proof.speed import bench_models
from corp_deploy.spec.trusted_code import trusting_code
from ground.errors import BadInput
from perf.record.runs import Bench
from perf.stats.stats import Interval
from perf.stats.summary import Summary, summarise

from .in_python import function_from_record
from .models import Directory, PathLike, module_beside
from .values import InputsLike, as_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A measurement of dense against reduced: the `record` with raw samples, and its `summary` by batch size.

    The summary has times in milliseconds, speed-ups with 95 % intervals, and the noise of the dense model against
    itself.
    """

    record: Bench
    summary: Summary

    @property
    def speedups(self) -> Mapping[int, Interval | None]:
        """Dense over reduced median time by batch size, None for a batch size that could not be timed."""
        return {row.batch: row.speedup for row in self.summary.rows}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons why the figures are less certain."""
        return self.record.warnings


@dataclass(frozen=True, kw_only=True)
class BenchCall(BenchOptions, TextFed, BenchFiles):
    """The parameters of `bench`."""

    dense: PathLike = field(kw_only=False)
    reduced: PathLike = field(kw_only=False)
    inputs: InputsLike | None = None
    trust_code: bool = False
    trust_engine: bool = False


@function_from_record(BenchCall)
def bench(call: BenchCall) -> Speed:
    """Time two models, interleaved, in one process or several, and the first against itself, which shows the noise.

    Both are ONNX files, engines, model directories or AOTInductor packages. `batches` are measured one after the other;
    one that takes longer than `time_limit` has no speed-up, and a warning says how long it takes. The models run on
    `inputs` (preprocessed, [N,C,H,W]), on lines of `text`, or on noise, which costs the same time. Options that the
    backend would ignore are refused. The record with its raw samples is written to `output`.

    Raises BadInput for models with different inputs, and for code or engines that are not trusted; Missing if this
    machine can't run them.
    """
    if odd := [each for each in (call.dense, call.reduced) if not isinstance(each, str | os.PathLike)]:
        raise BadInput(f"a {type(odd[0]).__name__} in memory can't be timed; export both, and give the two .onnx files")
    if call.launches > 1 and any(isinstance(each, Directory) and each.module for each in (call.dense, call.reduced)):
        raise BadInput(
            f"launches={call.launches}: a module in memory can't be given to fresh processes; export both models, and "
            "give the two .onnx files"
        )
    with ExitStack() as stack:
        stack.enter_context(module_beside([call.dense, call.reduced]))
        stack.enter_context(trusting_code(call.trust_code))
        stack.enter_context(trusting_engines(call.trust_engine))
        images = None if call.inputs is None else stack.enter_context(as_file(call.inputs, most=max(call.batches)))
        measured = bench_models(
            Path(call.dense),
            Path(call.reduced),
            call,
            fed=FedOptions(images=images, text=call.text),
            output=None if call.output is None else Path(call.output),
        )
    return Speed(record=measured, summary=summarise(measured))
