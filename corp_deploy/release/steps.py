"""The work of calibrate, reduce, export and other commands, carried out by releases and the demo.

Each function takes the Invocation that a release prints as the stage's command, or the recipe. It reads files below
`dirs.root` and writes below `dirs.into`.
"""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from calib.groups import BY_NAME, UNGROUPED
from calib.images import Images
from calib.inputs import shuffle_inputs, split_by_mask
from calib.store import load_moments
from corp_deploy.families.family import sites_of
from corp_deploy.invocation.calibration import CalibrateOptions
from corp_deploy.invocation.engine import ServingOptions
from corp_deploy.invocation.export_choice import ExportOptions
from corp_deploy.invocation.input_choice import Decoded, Drawn, HoldOutOptions
from corp_deploy.invocation.option import Invocation
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.invocation.running import BenchOptions, FedOptions
from corp_deploy.planning.calibration_size import measure_calibration_size
from corp_deploy.planning.carried_out import Polishing
from corp_deploy.planning.execution import reduce_checkpoint
from corp_deploy.planning.judging import score_inputs
from corp_deploy.planning.request import apply_merging_choice
from corp_deploy.proof.graphs import Graphs
from corp_deploy.proof.limits import ParityLimits
from corp_deploy.proof.model_inputs import feeds_for_graph, inputs_from_set
from corp_deploy.proof.proof_inputs import ProofInputs
from corp_deploy.proof.prove import candidates_from_paths, run_proof
from corp_deploy.proof.report_input import gather_report
from corp_deploy.proof.speed import bench_models
from corp_deploy.reduction import moments_files
from corp_deploy.reduction.moments import reference_of_summary
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.store.labels import labels_for
from export.triton.repository import write_repository
from ground.arrays import array_from_npy
from ground.effort import measure_effort
from ground.errors import BadInput
from ground.feeds import single_array
from ground.files import write_json, write_text
from ground.gpu import require_device
from ground.places import place_below
from perf.parity.parity import Parity
from perf.record.runs import Bench
from perf.report.page import html_from_content

from . import names
from .check import REPLAY_ERROR, GraphAnswers, SamplesRecord, load_samples, opened_graph, path_in_release, run_on_images
from .incremental import StageDirs
from .proven import proof_of_directory
from .recipe import Recipe, trusted_metrics
from .recipe_tables import require_more
from .serving import package_of_directory


def _images(dense: Checkpoint, dirs: StageDirs, run: Invocation) -> Images:
    drawn, decoded = Drawn.from_options(run.options).drawn, Decoded.from_options(run.options).decoded
    return images_for_model(dense.model, place_below(dirs.root, run["images"]), **drawn, **decoded)


def _held_out(dirs: StageDirs, run: Invocation) -> HoldOutOptions:
    return HoldOutOptions.from_options({**run.options, "groups": _groups(dirs, run)})


def _groups(dirs: StageDirs, run: Invocation) -> str | None:
    """Return the option `groups`; the path of a file with labels is joined to `dirs.root`."""
    groups: str | None = run["groups"]
    return groups if groups in (None, UNGROUPED, *BY_NAME) else str(dirs.root / groups)


def write_calibration(dirs: StageDirs, run: Invocation) -> None:
    """Calibrate a model and write its moments and their summary, continuing an interrupted calibration."""
    options = CalibrateOptions.from_options({**run.options, "groups": _groups(dirs, run)})
    drawn = Drawn.from_options(run.options)
    require_device(options.device)
    dense = apply_merging_choice(load_checkpoint(dirs.root / run["model"]), options)
    running = moments_files.CalibrationRun(
        unfinished=dirs.unfinished,
        save_every=run["checkpoint_every"],
        snapshots=tuple(options.snapshots),
        fitting=lambda share: f'attention_system = "kept" under [calibration], where reduce.attn is {share:g} or more',
        smaller=lambda size: dirs.tell(f"memory ran out in a batch: begun anew with batch_size = {size}"),
    )
    source = _images(dense, dirs, run)
    if options.snapshots:
        require_more(source.count - (options.hold_out or 0), tuple(options.snapshots))
    source, request = options.order_for_snapshots(source, **drawn.drawn), options.request(seed=drawn.seed)
    with measure_effort(dirs.watch, "calibrate"):
        fitted, *_ = moments_files.write_moments(dense, source, request, running, dirs.into / run["output"])
    if run["summary"] is not None:
        write_json(dirs.into / run["summary"], reference_of_summary(fitted, run["output"]))


def write_reduced(dirs: StageDirs, run: Invocation, choice: ReduceOptions) -> None:
    dense, seed, images = load_checkpoint(dirs.root / run["model"]), Drawn.from_options(run.options).seed, None
    if run["held_out"] is not None:
        choice = replace(choice, held_out=dirs.root / run["held_out"])
    if choice.needs_images:
        images = _held_out(dirs, run).split(_images(dense, dirs, run), seed).fitted
    reduce_checkpoint(
        dense,
        dirs.root / run["moments"],
        choice,
        directory=dirs.into / run["output"],
        images=images,
        polishing=Polishing(state=dirs.unfinished),
        watch=dirs.watch,
    )


def write_graphs(dirs: StageDirs, run: Invocation, options: ExportOptions) -> None:
    """Write a typed ONNX graph of a model in each precision of `options`."""
    checkpoint = load_checkpoint(dirs.root / run["model"])
    feeds = inputs_from_set(_images(checkpoint, dirs, run)).feeds if options.quantised else None
    graphs = Graphs(checkpoint, options, feeds)
    for precision, path in graphs.paths(dirs.into / run["output"]).items():
        with measure_effort(dirs.watch, "export"):
            graphs.write(precision, path)


def write_parity(dirs: StageDirs, run: Invocation) -> Parity:
    """Compare the dense model, the reduced one and its graphs on held-out images; write and return the record."""
    reference, *candidates = run.arguments
    dense = load_checkpoint(dirs.root / reference)
    source = _held_out(dirs, run).proving(_images(dense, dirs, run), Drawn.from_options(run.options).seed)
    labels = None if run["labels"] is None else labels_for(dirs.root / run["labels"], source, dense.model)
    limits = ParityLimits.from_options(run.options)
    inputs = inputs_from_set(source, labels)
    proof = run_proof(
        dense,
        candidates_from_paths(candidates, below=dirs.root),
        inputs,
        replace(limits, heads=tuple(dirs.root / path for path in limits.heads)),
        output=dirs.into / run["output"],
        moments_file=None if run["moments"] is None else dirs.root / run["moments"],
        metrics=trusted_metrics(run["metric"] or ()),
        below=dirs.root,
    )
    return proof.parity


def write_bench(dirs: StageDirs, run: Invocation) -> Bench:
    """Time dense against reduced; write and return the record; raise BadInput if no batch size could be timed."""
    dense, reduced = (dirs.root / path for path in run.arguments)
    options = BenchOptions.from_options(run.options)
    fed, output = FedOptions(images=place_below(dirs.root, run["images"])), dirs.into / run["output"]
    bench = bench_models(dense, reduced, options, fed=fed, output=output, command=run.argv)
    if not bench.is_timed:
        raise BadInput(f"no batch size could be timed: {'; '.join(bench.warnings)} (in a recipe bench.time_limit_s)")
    return bench


def write_package(dirs: StageDirs, run: Invocation) -> None:
    """Write the model repository for an inference server; without `allow_failed`, not if the model's proof failed."""
    (directory,), labels = run.arguments, run["labels"]
    options = ServingOptions.from_options({**run.options, "labels": labels and dirs.root / labels})
    proof = proof_of_directory(dirs.root / directory)
    if not proof.failed or options.allow_failed:
        packaged, _ = package_of_directory(dirs.root / directory, proof, options)
        write_repository(packaged, dirs.into / run["output"])


def write_page(dirs: StageDirs, run: Invocation) -> None:
    (directory,) = run.arguments
    write_text(dirs.into / run["output"], html_from_content(gather_report(dirs.root / directory, run["title"])))


def write_samples(dirs: StageDirs, recipe: Recipe) -> None:
    """Write a few held-out images in the form of the graphs' inputs, every graph's outputs, and samples.json."""
    labels = recipe.held_out.labels if names.has_sample_labels(recipe) else None
    dense = load_checkpoint(dirs.root / "dense")
    source = recipe.proof_images.proving_images(dense.model)
    count = min(recipe.samples.count, source.count)
    images = next(iter(source.batches(count))).numpy()
    images = single_array(feeds_for_graph(dense, {"images": images}, recipe.export.graph_input))
    (dirs.into / names.SAMPLES).parent.mkdir()
    np.save(dirs.into / names.SAMPLES, images)
    graphs = {}
    for subject in names.SUBJECTS:
        for precision in recipe.export.precisions:
            graph, expected = f"{subject}/{names.graph_name(precision)}", names.answers_name(subject, precision)
            with opened_graph(dirs.root / graph) as runner:
                np.save(dirs.into / expected, run_on_images(runner, images))
            graphs[graph] = GraphAnswers(expected=expected, max_relative_error=REPLAY_ERROR[precision])
    if labels is not None:
        np.save(dirs.into / names.SAMPLE_LABELS, labels_for(labels, source, dense.model)[:count])
    record = SamplesRecord(
        images=names.SAMPLES,
        count=count,
        graphs=graphs,
        names=tuple(source.name(place) for place in range(count)) if recipe.parity.metric else (),
        labels=None if labels is None else names.SAMPLE_LABELS,
    )
    entries = {key: value for key, value in msgspec.to_builtins(record).items() if value not in ([], (), None)}
    write_json(dirs.into / names.SAMPLES_RECORD, entries)


def named_samples(inputs: ProofInputs, root: Path) -> ProofInputs:
    """Return the samples (`inputs`) with the names and labels of their images from samples.json."""
    record = load_samples(root)
    labels = None if record.labels is None else array_from_npy(path_in_release(root, record.labels))
    return replace(inputs, names=record.names, labels=labels)


MOST_JUDGED = 512
"""The most held-out images that write_size judges by, since all of them are in memory at once."""


def write_size(dirs: StageDirs, recipe: Recipe) -> None:
    """Write the errors of reductions to the release's widths by the number of calibration images.

    A reduction from each snapshot's moments is judged on the images that prove the result and, site by site, on the
    moments of those that calibration.hold_out left out.
    """
    choice, calibration, drawn_by = recipe.reduce, recipe.calibration, recipe.proof_images.seed
    dense = apply_merging_choice(load_checkpoint(dirs.root / "dense"), choice.of_statistics)
    proving = recipe.proof_images.proving_images(dense.model)
    judging = (
        proving if proving.count <= MOST_JUDGED else shuffle_inputs(proving, seed=drawn_by).subset(range(MOST_JUDGED))
    )
    images = images_for_model(dense.model, calibration.images, max_bad=calibration.max_bad)
    if recipe.proves_on_calibration:
        images, _ = split_by_mask(images, torch.isin(images.ids, proving.ids))
    planned = None
    if choice.allocates or choice.auto_heads:
        planned = {site.name: site.width for site in sites_of(load_checkpoint(dirs.root / "reduced").model).every}
    size = measure_calibration_size(
        dense.model,
        [load_moments(dirs.root / name) for name in (*names.snapshots_of(recipe), names.MOMENTS)],
        choice.method_asked,
        widths=planned,
        held_out=load_moments(dirs.root / names.HELD_OUT_MOMENTS) if recipe.judges_sites else None,
        scored=score_inputs(dense.model, judging, None, calibration.batch_size),
        calibration=images,
    )
    write_json(dirs.into / names.SIZE, size.as_json())
