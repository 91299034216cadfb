"""The commands inspect, inspect redundancy, calibrate and calibrate --merge."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from corp_deploy.invocation.budget_choice import MACS, MOST_CUT, BudgetChoice
from corp_deploy.invocation.calibration import CalibrateFiles, CalibrateRun
from corp_deploy.invocation.input_choice import KINDS, InputOptions, RequiredInputs
from corp_deploy.views.console import Output
from ground.errors import BadInput

from .command import ModelChoice, command, some
from .options import FILE, current_command, explicit_options

if TYPE_CHECKING:
    from corp_deploy.store.checkpoint import Checkpoint
    from ground.effort import Stopwatch


@command(first="model weights images output samples attention-system hold-out batch-size device text")
@click.option("--summary", type=FILE, default=None, help="Also write a JSON summary of OUTPUT, with its digest.")
def calibrate_command(
    model: ModelChoice,
    inputs: Annotated[RequiredInputs, some(*KINDS, "samples", "seed", "workers", "max_bad")],
    files: CalibrateFiles,
    options: CalibrateRun,
    summary: Path | None,
    out: Output,
) -> None:
    """Collect second-order statistics on unlabelled inputs.

    Every image is read once; with the statistics that costs about as much as 2 bare forward passes. With --attn a first
    pass ranks the dimensions, unless those of --moments do.

    The model's name with its weights, arguments and preprocessing is written beside OUTPUT, with .model.toml in place
    of OUTPUT's suffix: give that file as --model to the commands that follow.

    With --checkpoint-every, the same command resumes after an interruption. Under torchrun every process takes its
    share of the images: torchrun --nproc-per-node 2 -m corp_deploy calibrate ... On a cluster, tasks with --shard 1/4
    to --shard 4/4 take a share each, and calibrate --merge adds their files.

    With --hold-out, the second file is for reduce --held-out, which judges every site on images that it was not fitted
    to.

    Where names or near-duplicates show which images belong together, reduce measures what widths lose on whole groups
    that it sets apart. With --groups the file, then twice as large, also has statistics of two halves of the images
    that split no group: reduce then chooses the ridge of every site by the loss of each half's fit on the other half,
    and calibrate estimates how many more groups would help.

    The per-image system of all dimensions is large: 40 GiB for DeiT-H. With --attention-system --attn S a second pass
    collects it, without approximation, for the dimensions kept at sparsity S or a larger one; calibrations with the
    same --moments can be merged.

    With --snapshots 100,500,1000 the moments of the first 100, 500 and 1000 images are the same as those of a
    calibration on these alone, so that one pass shows how many images are enough. Snapshots at multiples of
    --batch-size need no second copy of the sums in memory. All images together rank the dimensions of --attn and form
    the halves of --groups; held-out images are the same for all. The images of a folder come in sorted order, not at
    random: give --samples.

    With --merge-tokens the statistics are those of the model with merged tokens, each weighted by the number of tokens
    merged into it; give reduce the same schedule.

    With --sequential a decoder is read and calibrated block by block, so that one with seven billion parameters needs
    memory for a block, its sums, and the residual stream of all sequences only.

    Example: corp-deploy calibrate --model deit_small_patch16_224 --weights deit_small.safetensors --images photos/
    -o moments.safetensors
    """
    from corp_deploy.planning.request import apply_merging_choice
    from corp_deploy.reduction.calibrate import ranks_of_this_run
    from corp_deploy.reduction.moments_files import CalibrationRun, write_moments
    from corp_deploy.release.recipe_file import model_table
    from corp_deploy.release.recipe_toml import text_of_model
    from corp_deploy.store.manifest import path_beside, timed_on, write_effort
    from ground.files import write_text
    from ground.gpu import require_device

    require_device(options.device)
    output = Path(files.output)
    if options.sequential:
        return _by_block(model, inputs, output, options, summary, out)
    with timed_on(options.device) as watch, ranks_of_this_run(options.device) as ranks:
        out = out if ranks.rank == 0 else Output(json=False, quiet=True)
        checkpoint = apply_merging_choice(model.load(out), options)
        opened = options.own_shard(inputs.open(checkpoint, out.note))
        source = options.order_for_snapshots(opened, **inputs.drawn)
        unsaved = "" if options.checkpoint_every is None else "; no states are saved unless that size is given"
        run = CalibrationRun(
            ranks=ranks,
            unfinished=output,
            save_every=options.checkpoint_every,
            snapshots=tuple(options.snapshots),
            on_bytes_needed=lambda size: out.note(f"the sums will take {size / 2**20:,.0f} MiB"),
            progress=lambda title, count: out.progress(f"calibrating {title}", count, unit=source.noun),
            fitting=lambda share: current_command(attn=f"{share:g}"),
            smaller=lambda size: out.warn(f"memory ran out in a batch: begun anew with --batch-size {size}{unsaved}"),
        )
        resumed, model_file = run.goes_on, output.with_suffix(".model.toml")
        writes_model = bool(model.non_default) and not explicit_options()["model"].endswith(".toml")
        with watch.measure("calibrate"):
            summaries = write_moments(checkpoint, source, options.request(seed=inputs.seed), run, output)
        if summaries and writes_model:
            write_text(model_file, text_of_model(model_table(model), output.parent))
        run.clear()
    if summaries:
        write_effort(path_beside(output), "calibrate", watch, device=options.device, resumed=resumed)
        more = [f"{model_file}: the model, for --model of the next commands"] * writes_model
        _print_calibration(summaries, checkpoint, source.noun, summary, watch, out, *more)


def _print_calibration(
    summaries: Sequence[dict[str, Any]],
    checkpoint: "Checkpoint",
    noun: str,
    summary: Path | None,
    watch: "Stopwatch",
    out: Output,
    *more: str,
) -> None:
    """Print the moments files and warnings of a calibration; write a JSON summary to the path `summary`, if any."""
    from corp_deploy.reduction.moments import reference_of_summary
    from corp_deploy.views.inspection import preprocessing_line, preprocessing_record
    from corp_deploy.views.reduction import line_of_moments, lines_of_overfitting, lines_of_pictures
    from ground.files import write_json

    record, *held_out = summaries
    for warning in record.get("warnings", ()):
        out.warn(warning)
    if summary is not None:
        write_json(summary, reference_of_summary(record, str(record["moments"])))
    lines = [line_of_moments(each, noun) for each in (*record.get("snapshots", []), *summaries)]
    lines += [
        *lines_of_pictures(record),
        *lines_of_overfitting(record),
        *more,
        preprocessing_line(checkpoint),
        *watch.lines,
    ]
    record |= preprocessing_record(checkpoint) | ({"held_out": held_out[0]} if held_out else {})
    out.result(record | {"effort": watch.as_json()}, *lines)


def _by_block(
    model: ModelChoice,
    inputs: InputOptions,
    output: Path,
    options: CalibrateRun,
    summary: Path | None,
    out: Output,
) -> None:
    """Calibrate a decoder of transformers with one block in memory at a time; write and print the moments."""
    from calib.distributed import under_torchrun
    from corp_deploy.reduction.sequential import SequentialRun, write_moments_by_block
    from corp_deploy.store.decoder_layers import open_layers
    from corp_deploy.store.hub_snapshot import PREFIX
    from corp_deploy.store.manifest import path_beside, timed_on, write_effort

    if under_torchrun():
        raise BadInput("--sequential: one process takes block after block; start it without torchrun")
    if not model.model.startswith(PREFIX):
        raise BadInput(f"--sequential: --model {model.model} is no directory of a decoder; give --model hf:DIR")
    with timed_on(options.device) as watch:
        layers = open_layers(Path(model.model.removeprefix(PREFIX)), model.kwargs or {})
        source = inputs.open(layers.checkpoint, out.note)
        blocks = layers.arguments.decoder.layers
        with out.progress(f"calibrating {output.stem}", blocks, unit="blocks") as bar, watch.measure("calibrate"):
            run = SequentialRun(
                statistics=options.statistics,
                batch_size=options.batch_size,
                device=options.device,
                on_bytes_needed=lambda size: out.note(f"a block with all streams will take {size / 2**20:,.0f} MiB"),
                on_progress=bar,
            )
            summaries = write_moments_by_block(layers, source, run, output, hold_out=options.hold_out, seed=inputs.seed)
    write_effort(path_beside(output), "calibrate", watch, device=options.device)
    _print_calibration(summaries, layers.checkpoint, source.noun, summary, watch, out)


@command("calibrate --merge")
@click.argument("parts", nargs=-1, required=True, type=FILE)
@click.option("--output", "-o", type=FILE, required=True, help="Moments file to write.")
def merge_command(parts: tuple[Path, ...], output: Path, out: Output) -> None:
    """Add the moments of separate calibrations.

    Moments of different models or preprocessing, or of the same images, are refused.

    Example: corp-deploy calibrate --merge monday.safetensors tuesday.safetensors -o both.safetensors
    """
    from corp_deploy.reduction.moments_files import merge_files

    summary = merge_files(parts, output)
    for warning in summary.get("warnings", ()):
        out.warn(warning)
    out.result(summary, f"{output}: {summary['images']} images of {len(parts)} calibrations")


PLANNED = f"Share of the MACs to keep in the plan, which shows what every site would lose; default: {MACS}."


@command(first="model macs weights outputs trust-code json")
def inspect(model: ModelChoice, budget: Annotated[BudgetChoice, some("macs", macs=PLANNED)], out: Output) -> None:
    """Show what can be reduced, and what a budget removes.

    It shows the sites with their widths, parameters and MACs, the preprocessing, and the reasons why other parts can't
    be reduced. No weights are needed.

    Example: corp-deploy inspect --model deit_small_patch16_224 --weights deit_small.safetensors
    """
    from corp_deploy.families.inspection import inspection_of_model
    from corp_deploy.invocation.reduction import ReduceOptions
    from corp_deploy.planning.first_plan import compute_first_plan
    from corp_deploy.views.inspection import inspection_shown, preprocessing_record

    checkpoint, macs = model.look(out), budget.macs or MACS
    record = inspection_of_model(checkpoint.model) | preprocessing_record(checkpoint)
    plan = compute_first_plan(checkpoint.model, ReduceOptions(macs=macs).method_asked, macs, MOST_CUT)
    record |= {"plan": plan.as_json()}
    out.result(record, *inspection_shown(checkpoint, record, plan))


@command("inspect redundancy")
@click.option("--moments", type=FILE, required=True, help="Moments written by calibrate.")
@click.option("--output", "-o", type=FILE, default=None, help="Also write the record (.json) or its plot (.svg).")
def redundancy_command(moments: Path, output: Path | None, out: Output) -> None:
    """Show how redundant the sites of a model are, before pruning.

    It shows effective ranks and how many dimensions hold the energy.

    Example: corp-deploy inspect redundancy --moments moments.safetensors -o redundancy.svg
    """
    from calib.redundancy import record_from_redundancy
    from calib.redundancy import redundancy_of_sites as redundancy_of
    from calib.store import load_moments
    from corp_deploy.views.reduction import redundancy_plot, redundancy_tables
    from ground.files import write_json, write_text

    if output is not None and output.suffix not in (".json", ".svg"):
        raise click.BadParameter(f"{output}: expected .json or .svg", param_hint="--output")
    loaded = load_moments(moments)
    entries = redundancy_of(loaded)
    record = record_from_redundancy(entries, loaded.lineage)
    if output is not None and output.suffix == ".json":
        write_json(output, record)
    elif output is not None:
        write_text(output, redundancy_plot(entries))
    out.result(record, *redundancy_tables(entries))
