"""corp-deploy build and corp-deploy audit."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from corp_deploy.invocation.table import AUDIT, BUILD
from corp_deploy.views.console import Output
from ground.errors import EXIT_FAILED
from ground.precision import EVERY_WORD
from ground.quantities import OPTIMIZATION_LEVEL, WORKSPACE_MIB

from .options import FILE, PROFILE, command_line, explicit_options, output_options, value_options
from .stopwatch import keep_effort, stopwatch_on
from .value import Value

if TYPE_CHECKING:
    from export.engine.build import Engine
    from export.engine.options import BatchProfile, BuildOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """What builds an engine, or an optimised graph, and what shapes it."""

    backend: str
    device: str
    precision: str | None
    batch: "tuple[BatchProfile, ...]"
    sm: tuple[str, ...]
    timing_cache: Path | None
    optimization_level: int | None
    workspace_mib: int | None
    version_compatible: bool
    sparse: bool
    compatibility: str | None

    @property
    def way(self) -> str:
        """Its name in the table of options."""
        return f"{self.backend}-{self.device}" if self.backend == "onnxruntime" else self.backend

    def options(self) -> "BuildOptions":
        from export.engine.options import BuildOptions

        return BuildOptions(
            backend=self.backend,
            precision=self.precision,
            profiles=self.batch,
            sms=self.sm,
            timing_cache=self.timing_cache,
            optimization_level=self.optimization_level,
            workspace_bytes=None if self.workspace_mib is None else self.workspace_mib * 2**20,
            version_compatible=self.version_compatible,
            sparse=self.sparse,
            compatibility=self.compatibility,
            command=command_line(),
        )

    def build(self, graph: Path, done: Callable[[int], None]) -> "Engine":
        """Build it; `done` hears the builder's steps, where it has any."""
        from export.engine.build import build_engine
        from export.engine.ort_artifact import build_ort_artifact

        if self.backend == "onnxruntime":
            return build_ort_artifact(graph, device=self.device, precision=self.precision, command=command_line())

        def progress(phase: str, steps: int, _: int) -> None:
            if phase == "Building engine":
                done(steps)

        return build_engine(graph, self.options(), progress=progress)


def _engine_choice(**options: Any) -> EngineChoice:
    choice = EngineChoice(**options)
    BUILD.refuse([("", choice.way)], explicit_options())
    return choice


engine_options = value_options(
    "engine",
    _engine_choice,
    click.option(
        "--backend",
        type=click.Choice(["tensorrt", "tensorrt-rtx", "onnxruntime"]),
        default="tensorrt",
        show_default=True,
        help="What builds it; TensorRT-RTX and ONNX Runtime need no GPU.",
    ),
    click.option(
        "--batch",
        type=PROFILE,
        multiple=True,
        help=f"A profile min:opt:max, such as 1:8:64; may be given several times. {BUILD.help('batch')}",
    ),
    click.option(
        "--sm",
        multiple=True,
        help=f"A target such as 86; may be given several times; none is portable. {BUILD.help('sm')}",
    ),
    click.option("--precision", type=click.Choice(EVERY_WORD), default=None, help="Refuse other graphs."),
    click.option(
        "--timing-cache",
        type=FILE,
        default=None,
        help=f"TensorRT's timing cache: read, reused, written whole. {BUILD.help('timing_cache')}",
    ),
    click.option(
        "--optimization-level",
        type=Value(OPTIMIZATION_LEVEL),
        default=None,
        help=f"The builder's effort. {BUILD.help('optimization_level')}",
    ),
    click.option(
        "--workspace-mib",
        type=Value(WORKSPACE_MIB),
        default=None,
        help=f"Limit of the builder's workspace. {BUILD.help('workspace_mib')}",
    ),
    click.option(
        "--version-compatible",
        is_flag=True,
        help=f"A plan that newer TensorRT versions load too. {BUILD.help('version_compatible')}",
    ),
    click.option(
        "--compatibility",
        type=click.Choice(["ampere-plus", "same-compute-capability", "portable", "targets"]),
        default=None,
        help="A plan that runs on more GPUs, with its price: plans for one GPU each are built too, beside it. "
        f"{BUILD.help('compatibility')}",
    ),
    click.option(
        "--sparse",
        is_flag=True,
        help=f"Sparse kernels where weights are 2:4; refused where none are. {BUILD.help('sparse')}",
    ),
    click.option(
        "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help=BUILD.help("device")
    ),
)


@click.command()
@click.argument("graph", type=FILE)
@click.option(
    "--output", "-o", type=FILE, required=True, help="Plan (or optimised graph) to write; its record goes beside."
)
@engine_options
@output_options
def build(graph: Path, output: Path, engine: EngineChoice, out: Output) -> None:
    """Build an engine from a typed ONNX graph and write its record beside it.

    Example: corp-deploy build reduced/model.fp16.onnx --backend tensorrt-rtx --batch 1:8:64 -o reduced/model.plan
    """
    from corp_deploy.proof.compatibility import bench_lines, build_priced
    from corp_deploy.views.engine import engine_table
    from export.engine.build import write_engine

    lines: tuple[str, ...] = ()
    with stopwatch_on() as watch, out.progress("building", None, unit="steps") as done, watch.of("build"):
        if engine.compatibility is None:
            built = engine.build(graph, done)
            write_engine(built, output)
        else:
            built = build_priced(graph, engine.options(), output)
            lines = bench_lines(built.record, output)
    keep_effort(watch, output, step="build")
    record = json.loads(built.record.to_json()) | {"effort": watch.as_json()}
    out.result(record, engine_table(built.record), f"{output}: written", *lines, *watch.lines)


@click.command()
@click.argument("dense", type=FILE)
@click.argument("reduced", type=FILE)
@click.option(
    "--backend",
    type=click.Choice(["tensorrt", "tensorrt-rtx"]),
    default="tensorrt-rtx",
    show_default=True,
    help="What builds both; TensorRT-RTX needs no GPU.",
)
@click.option(
    "--sm",
    multiple=True,
    default=("86",),
    show_default=True,
    help=f"Targets; may be given several times. {AUDIT.help('sm')}",
)
@click.option("--output", "-o", type=FILE, default=None, help="Also write the audit as JSON.")
@output_options
@click.pass_context
def audit(
    ctx: click.Context, dense: Path, reduced: Path, backend: str, sm: tuple[str, ...], output: Path | None, out: Output
) -> None:
    """Count the attention kernels that stay fused, dense beside reduced; exit 1 when a block lost its own.

    Example: corp-deploy audit dense/model.fp16.onnx reduced/model.fp16.onnx --sm 86 --sm 120
    """
    from corp_deploy.views.engine import audit_table, lost_lines
    from export.engine.audit import audit_fusion, audit_to_json
    from ground.files import write_text

    AUDIT.refuse([("", backend)], explicit_options())
    targets = sm if backend == "tensorrt-rtx" else ()
    with out.progress("auditing", None, unit="steps"):
        audits = audit_fusion(dense, reduced, backend=backend, sms=targets, command=command_line())
    text = audit_to_json(audits, dense=dense.name, reduced=reduced.name)
    if output is not None:
        write_text(output, text)
    out.result(json.loads(text), audit_table(audits), *lost_lines(audits))
    if not all(each.passed for each in audits):
        ctx.exit(EXIT_FAILED)
