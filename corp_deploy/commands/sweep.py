"""The command sweep, and its start in several processes."""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from corp_deploy.invocation.input_choice import KINDS, RequiredInputs
from corp_deploy.invocation.running import SweepSpeedChoice
from corp_deploy.spec.class_labels import LABELS_HELP
from corp_deploy.views.console import Output
from ground.errors import BadInput, Missing
from ground.files import locked
from ground.threads import THREADS, usable_cpus

from .command import ModelChoice, command, some
from .options import DIRECTORY, FILE, Paths, current_words, explicit_options, usage_errors
from .sweep_choice import SweepChoice, TrialsChoice

if TYPE_CHECKING:
    from calib.inputs import InputSet
    from corp_deploy.planning.calibration_size import CalibrationSize
    from corp_deploy.planning.sweep import SweepContext
    from corp_deploy.planning.sweep_points import SweepPoint
    from corp_deploy.planning.sweep_trials import SweepRequest
    from corp_deploy.views.console import Bar


LABELS = f"{LABELS_HELP} For accuracy."


def _alone_in(folder: Path) -> ExitStack:
    """Lock the folder until the returned stack is closed; under torchrun only the process of rank 0 locks it."""
    stack = ExitStack()
    if os.environ.get("RANK", "0") == "0":
        stack.enter_context(locked(folder, folder / ".lock", what="sweep"))
    return stack


@command(first="model weights moments images output sparsity macs preset bench min-agreement")
@click.option(
    "--moments",
    type=Paths(FILE),
    required=True,
    help="Moments of this model, written by calibrate; several, with commas, such as those of --snapshots, also "
    "show how many images are enough.",
)
@click.option(
    "--output",
    "-o",
    type=DIRECTORY,
    required=True,
    help="Directory for sweep.json, sweep.csv, sweep.html, sweep.svg and the trials, from which the same command "
    "resumes.",
)
def sweep_command(
    model: ModelChoice,
    moments: tuple[Path, ...],
    inputs: Annotated[RequiredInputs, some(*KINDS, "labels", "samples", "seed", labels=LABELS)],
    output: Path,
    sweep: SweepChoice,
    speed: SweepSpeedChoice,
    trials: TrialsChoice,
    out: Output,
) -> None:
    """Try many reductions of a model from the same moments.

    They differ in sparsities, presets and other options, and are compared by error, agreement and, with --bench,
    latency.

    Finished trials are kept in OUTPUT/trials, and the same command continues after them. On several machines: torchrun
    --max-restarts 3 ... -m corp_deploy sweep ...; each process reduces a trial at a time, and each machine's first
    process times its trials after all are reduced.

    Example: corp-deploy sweep --model dense --moments moments.safetensors --images held-out/ --sparsity 0.3,0.5,0.7
    --bench onnxruntime --batch 1,16 --min-agreement 0.99 -o sweep
    """
    from calib.store import load_moments
    from corp_deploy.planning.judging import score_inputs
    from corp_deploy.planning.sweep import SweepContext, SweepRun, run_sweep
    from corp_deploy.reduction.calibrate import ranks_of_this_run
    from ground.gpu import require_device

    with usage_errors():
        sweep.requests()
        if trials.held_out is not None and len(moments) < 2:
            raise BadInput("--held-out judges how many images are enough; give --moments of several numbers of images")
    require_device("cuda" if speed.bench == "engine" else speed.device)
    with _alone_in(output) as alone:
        with ranks_of_this_run("cpu", timeout_s=86_400.0) as ranks:
            out = out if ranks.rank == 0 else Output(json=False, quiet=True)
            checkpoint = model.load(out)
            sweep = sweep.of_model(checkpoint.model)
            sweep.refuse_far(checkpoint.model)
            requests = sweep.requests(len(moments))
            source = inputs.open(checkpoint, out.note)
            labels, calibration = inputs.class_indices(source, checkpoint, out.note), sweep.calibration
            swept = SweepContext(
                dense=checkpoint,
                moments=moments,
                statistics=tuple(map(load_moments, moments)),
                source=source,
                scored=score_inputs(checkpoint.model, source, labels, trials.batch_size),
                calibration=None if calibration.path is None else calibration.open(checkpoint, out.note),
            )
            if trials.jobs > 1 and ranks.size == 1:
                alone.close()  # one of the processes takes the lock
                with out.progress(f"{len(requests)} trials by {trials.jobs} processes", None):
                    without = (*ALONE, *(() if speed.engine else ("batch",)))
                    run_jobs(current_words(without=without, keep_models=True), trials.jobs)
                alone.enter_context(_alone_in(output))
            with out.progress("sweeping", len(requests), unit="trials") as bar:
                run = SweepRun(
                    folder=output,
                    speed=speed,
                    ranks=ranks,
                    keep_models=trials.keep_models,
                    command=tuple(current_words()),
                    on_progress=lambda phase, count: bar.renamed(phase, count, len(requests), "trials"),
                )
                size = _size(swept, requests, trials.held_out, bar)
                points = run_sweep(swept, requests, run)
        if not ranks.rank:
            _report(sweep, swept, points, size, trials.min_agreement, inputs, output, out)


def _report(
    sweep: SweepChoice,
    swept: "SweepContext",
    points: "list[SweepPoint]",
    size: "CalibrationSize | None",
    least: float | None,
    inputs: RequiredInputs,
    output: Path,
    out: Output,
) -> None:
    """Write and print all results; then raise BadInput if no trial reaches the agreement `least`."""
    from corp_deploy.planning.sweep_points import build_sweep_record, describe_sweep, require_agreeing
    from corp_deploy.planning.sweep_points import smallest_that_agrees as smallest
    from corp_deploy.proof.report_input import SIZE_FILE
    from corp_deploy.views.sweep import csv_of_sweep, lines_of_gaps, sweep_plot, sweep_speeds, sweep_table
    from corp_deploy.views.sweep_page import sweep_page
    from ground.files import write_json, write_text

    if refused := max(point.sites_refused for point in points):
        out.warn(f"{refused} sites can't be reduced as asked and stay as they are; inspect says why")
    if disturbed := sum(any(each.disturbed for each in point.speeds) for point in points):
        out.warn(f"{disturbed} trials were timed on a busy or throttled machine; see sweep.json")
    dense = swept.scored.of_dense(swept.dense.model)
    agrees = least is not None and any((point.agreement or 0.0) >= least for point in points)
    fitted = swept.fitted
    if fitted is not None and fitted.has_overlap:
        out.warn(fitted.warning)
    if any(point.budget is not None for point in points) and swept.calibration is None:
        out.note(f"budgets were shared out by the judging {swept.source.noun}; --calibration-images keeps them apart")
    record = build_sweep_record(
        points, smallest(points, least) if least is not None and agrees else None, dense, fitted
    )
    page = sweep_page(points, dense, title=f"Sweep: {output.resolve().name}", size=size, fitted=fitted)
    for suffix, text in (("csv", csv_of_sweep(points)), ("svg", sweep_plot(points)), ("html", page)):
        write_text(output / f"sweep.{suffix}", text)
    lines = [describe_sweep(points)]
    if size is not None:
        write_json(output / SIZE_FILE, size.as_json())
        record["calibration_size"] = size.as_json()
        lines.append(size.sentence)
    else:
        (output / SIZE_FILE).unlink(missing_ok=True)  # an earlier sweep's, which `report` would show
    write_json(output / "sweep.json", record)
    if least is not None and agrees:
        lines += _answers(sweep, points, least, inputs, swept.source)
    speeds = sweep_speeds(points)
    out.result(record, sweep_table(points), *([] if speeds is None else [speeds]), *lines_of_gaps(points), *lines)
    if least is not None:
        require_agreeing(points, least)


def _size(
    swept: "SweepContext", requests: "list[SweepRequest]", held_out: Path | None, bar: "Bar"
) -> "CalibrationSize | None":
    """Return how many images are enough for the narrowest model; None for one moments file or for budgets alone."""
    from calib.store import load_moments
    from corp_deploy.planning.calibration_size import measure_calibration_size

    uniform = [request for request in requests if request.budget is None]
    count = len(swept.moments)
    if count < 2 or not uniform:
        return None
    of_preset = [each for each in uniform if each.preset == uniform[0].preset and each.knobs == uniform[0].knobs]
    return measure_calibration_size(
        swept.dense.model,
        swept.statistics,
        max(of_preset, key=lambda request: request.share).method,
        held_out=None if held_out is None else load_moments(held_out),
        scored=swept.scored,
        calibration=swept.calibration,
        on_progress=lambda judged: bar.renamed("judging numbers of images", judged, count, "numbers"),
    )


def _answers(
    sweep: SweepChoice, points: "list[SweepPoint]", least: float, inputs: RequiredInputs, source: "InputSet"
) -> list[str]:
    """Return sentences on the smallest and the fastest models that reach an agreement, with the options that make them.

    The models are chosen by the point estimate; the sentences say if verify would leave the agreement open.
    """
    from corp_deploy.planning.sweep_points import fastest_that_agrees, smallest_that_agrees

    options: dict[str, Any] = explicit_options()
    smallest = smallest_that_agrees(points, least)
    words = sweep.words_of(smallest, inputs, options)
    share = f"{smallest.macs_share:.1%} of the MACs{_open(smallest, least, source)}"
    lines = [f"smallest model with {least:.2%} agreement: {words} ({share})"]
    for batch, point in fastest_that_agrees(points, least).items():
        speed = point.speed_at(batch)
        assert speed is not None
        assert speed.speedup is not None
        gain = speed.speedup.describe(bounds=" times dense ({} to {})") + _open(point, least, source)
        lines.append(
            f"fastest with {least:.2%} agreement at batch {batch}: {sweep.words_of(point, inputs, options)} ({gain})"
        )
    return lines


def _open(point: "SweepPoint", least: float, source: "InputSet") -> str:
    """Return why a proof on these inputs would be inconclusive, "" if it would not be."""
    from perf.stats.decision import share_against
    from perf.stats.stats import DEFAULT_CONFIDENCE

    assert point.agreement is not None, point
    decision, words = share_against(
        point.agreement, least, count=source.count, noun=source.noun, confidence=DEFAULT_CONFIDENCE
    )
    return f"; chosen by the point, {words}" if decision == "INCONCLUSIVE" else ""


RESTARTS = 3
LONGEST_END_S = 40.0
ALONE = ("jobs", "bench", "precision", "threads", "device", "time_limit", "half_width", "min_agreement")
"""The options that the processes of --jobs don't get: those of timing, which the starting process does at the end."""


def run_jobs(words: Sequence[str], jobs: int) -> None:
    """Run the command `words` in `jobs` processes of torchrun on this machine, each of which runs a trial at a time.

    A process that dies is started again. Raises Missing if processes fail after all restarts.
    """
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(jobs))
    threads = str(max(usable_cpus() // jobs, 1))
    started = subprocess.Popen(
        [sys.executable, *torchrun, "--max-restarts", str(RESTARTS), "-m", "corp_deploy", *words, "--quiet"],
        env={THREADS: threads, **os.environ},
        stdout=subprocess.DEVNULL,
    )
    try:
        code = started.wait()
    finally:  # torchrun ends its processes when it is terminated, but not when it is killed
        if started.poll() is None:
            started.terminate()
            try:
                started.wait(LONGEST_END_S)
            except subprocess.TimeoutExpired:
                started.kill()
    if code:
        raise Missing(
            f"the {jobs} processes of this sweep ended early ({code}), each after {RESTARTS} restarts; finished "
            "trials are kept: look at the messages, then run the same command again"
        )
