"""corp_deploy.bench."""

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

from .in_python import verb
from .models import PathLike, module_beside
from .values import InputsLike, as_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Dense against reduced: `record`, raw samples and all, and what `summary` makes of it, by batch size: times in
    milliseconds, speed-ups with 95 % intervals, the noise of the dense model against itself.
    """

    record: Bench
    summary: Summary

    @property
    def speedups(self) -> Mapping[int, Interval | None]:
        """Dense over reduced median time by batch size; None where one could not run or there was no time."""
        return {row.batch: row.speedup for row in self.summary.rows}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what makes the figures less sure."""
        return self.record.warnings


@dataclass(frozen=True, kw_only=True)
class BenchCall(BenchOptions, TextFed, BenchFiles):
    """The options, with what is measured and on what."""

    dense: PathLike = field(kw_only=False)
    reduced: PathLike = field(kw_only=False)
    inputs: InputsLike | None = None
    trust_code: bool = False
    trust_engine: bool = False


@verb(BenchCall)
def bench(call: BenchCall) -> Speed:
    """Time two models in one process, interleaved, with the first against itself beside them.

    Both are ONNX files, engines, model directories or AOTInductor packages. `batches` are measured one after the other;
    one that takes longer than `time_limit` has no speed-up, and a warning says how long. `inputs` (preprocessed,
    [N,C,H,W]) or lines of `text` are fed, or noise, which costs the same time. An option that what runs them would
    ignore is refused. `output` gets the record with its raw samples.

    Raises BadInput for models that are not of one task, and for code or engines that are not trusted; Missing where
    this machine can't run them.
    """
    if odd := [each for each in (call.dense, call.reduced) if not isinstance(each, str | os.PathLike)]:
        raise BadInput(f"a {type(odd[0]).__name__} in memory can't be timed; export both, and give the two .onnx files")
    with ExitStack() as stack:
        stack.enter_context(module_beside([call.dense, call.reduced]))
        stack.enter_context(trusting_code(call.trust_code))
        stack.enter_context(trusting_engines(call.trust_engine))
        images = None if call.inputs is None else stack.enter_context(as_file(call.inputs))
        measured = bench_models(
            Path(call.dense),
            Path(call.reduced),
            call,
            fed=FedOptions(images=images, text=call.text),
            output=None if call.output is None else Path(call.output),
        )
    return Speed(record=measured, summary=summarise(measured))
