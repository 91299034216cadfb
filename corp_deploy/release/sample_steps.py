"""What the samples of a release are made of, and told by. Everything heavy is imported here, as in release_steps."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from corp_deploy.proof.inputs import ProofInputs, fed_to_graph
from corp_deploy.store.checkpoint import load_checkpoint
from corp_deploy.store.inputs import labels_from_path
from ground.arrays import array_from_npy
from ground.feeds import single_array
from ground.files import write_json

from .incremental import StageDirs
from .names import SAMPLE_LABELS, SAMPLES, SAMPLES_RECORD, SUBJECTS, answers_name, graph_name, has_sample_labels
from .recipe import Recipe
from .samples import REPLAY_ERROR, GraphAnswers, SamplesRecord, load_samples, of_release, opened_graph, replayed


def write_samples(dirs: StageDirs, recipe: Recipe) -> None:
    """A few held-out images as the graphs take them, preprocessed or their pixels, and what every graph answers."""
    labels = recipe.held_out.labels if has_sample_labels(recipe) else None
    dense = load_checkpoint(dirs.root / "dense")
    source = recipe.proof_images.proving_images(dense.model)
    count = min(recipe.samples.count, source.count)
    images = next(iter(source.batches(count))).numpy()
    images = single_array(fed_to_graph(dense, {"images": images}, recipe.export.input))
    (dirs.into / SAMPLES).parent.mkdir()
    np.save(dirs.into / SAMPLES, images)
    graphs = {}
    for subject in SUBJECTS:
        for precision in recipe.export.precisions:
            name, expected = f"{subject}/{graph_name(precision)}", answers_name(subject, precision)
            with opened_graph(dirs.root / name) as runner:
                np.save(dirs.into / expected, replayed(runner, images))
            graphs[name] = GraphAnswers(expected=expected, max_relative_error=REPLAY_ERROR[precision])
    if labels is not None:
        np.save(dirs.into / SAMPLE_LABELS, labels_from_path(labels, source, dense.model)[:count])
    record = SamplesRecord(
        images=SAMPLES,
        count=count,
        graphs=graphs,
        names=tuple(source.name(place) for place in range(count)) if recipe.parity.metric else (),
        labels=None if labels is None else SAMPLE_LABELS,
    )
    entries = {key: value for key, value in msgspec.to_builtins(record).items() if value not in ([], (), None)}
    write_json(dirs.into / SAMPLES_RECORD, entries)


def named_samples(inputs: ProofInputs, root: Path) -> ProofInputs:
    """The samples with the names and the labels of the images that they were made of, as far as they are told."""
    record = load_samples(root)
    labels = None if record.labels is None else array_from_npy(of_release(root, record.labels))
    return replace(inputs, names=record.names, labels=labels)
