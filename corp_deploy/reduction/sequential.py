"""Calibration of a decoder block by block: only one block's weights and sums are held, and all residual streams.

The statistics of a block are written to a file of their own before the next block is read; an interrupted run continues
from these files. In the end all are joined into one file of moments, equal to that of one pass over the whole model.

Legend: B sequences of a batch, N tokens, C channels.
"""

import glob
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from calib.collect import Collector, Options
from calib.fingerprints import Fingerprints
from calib.inputs import InputSet, held_out_split, tensors_by_name
from calib.memory import bytes_available, bytes_needed, refuse_too_large, shapes_of_sites
from calib.sites import Site
from calib.store import join_moments, load_moments, save_moments
from corp_deploy.families.decoder import traced_block
from corp_deploy.families.family import sites_of
from corp_deploy.families.traced_model import hooked_model
from corp_deploy.store.decoder_layers import DecoderLayers
from corp_deploy.store.input_sets import lineage_for_moments
from corp_deploy.traced.models.module import TracedModule
from corp_deploy.traced.models.sites import calibration_taps
from ground.errors import BadInput

from .calibrate import Statistics, choose_sites
from .moments import summary_of_moments
from .moments_files import held_out_path

Stream = list[Tensor]
"""The residual stream of each batch [B,N,C] float32, on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialRun:
    """The settings of the run, and its callbacks.

    `on_bytes_needed` receives the bytes of a block with all streams, `on_progress` the number of finished blocks.
    """

    statistics: Statistics
    batch_size: int
    device: str
    on_bytes_needed: Callable[[int], None] = lambda size: None
    on_progress: Callable[[int], None] = lambda finished: None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The sequences of one file of moments, fitted or held out, with their streams and the moments' lineage.

    Files of single blocks are named by `kept`, a digest of the settings of the statistics.
    """

    output: Path
    ids: Tensor
    lineage: Mapping[str, str]
    streams: Stream
    kept: str

    def of_block(self, index: int) -> Path:
        """Return the path of the file with one block's moments."""
        return self.output.with_name(f"{self.output.stem}.{self.kept}.block{index}.partial.safetensors")

    def is_done(self, index: int) -> bool:
        """Return whether an earlier run left this block's moments, of this model and these sequences."""
        try:
            return self.of_block(index).exists() and load_moments(self.of_block(index)).lineage == self.lineage
        except BadInput:
            return False


def _load_block(
    layers: DecoderLayers, index: int, where: str, site_names: Collection[str]
) -> tuple[TracedModule, list[Site]]:
    block = traced_block(index, layers.block(index).to(where), layers.arguments)
    return block, [site for site in calibration_taps(block, sites_of(block)) if site.name in site_names]


def _run_block(block: nn.Module, sites: list[Site], part: _Part, index: int, run: SequentialRun) -> None:
    """Take the streams through the block, and write its moments if they are wanted and not there yet."""
    if not sites or part.is_done(index):
        with torch.inference_mode():
            for number, x_BNC in enumerate(part.streams):
                part.streams[number] = block(x_BNC.to(run.device)).cpu()
        return
    options = run.statistics
    collector = Collector(
        block,
        sites,
        device=run.device,
        options=Options(attention_system=options.attention_system, eps=options.active_eps, precision=options.precision),
    )
    with collector:
        for number, x_BNC in enumerate(part.streams):
            part.streams[number] = collector.outputs_of(x_BNC).cpu()
    fingerprints = Fingerprints(ids=part.ids.sort().values)
    save_moments(replace(collector.moments(part.lineage), fingerprints=fingerprints), part.of_block(index))


def _embed_parts(
    layers: DecoderLayers, inputs: InputSet, run: SequentialRun, output: Path, *, hold_out: int | None, seed: int
) -> Iterator[_Part]:
    sets = {output: inputs}
    if hold_out is not None:
        fitted, held_out = held_out_split(inputs, hold_out, seed=seed)
        sets = {output: fitted, held_out_path(output): held_out}
    digest, kept = layers.digest(), hashlib.sha256(f"{run.statistics} {run.batch_size}".encode()).hexdigest()[:8]
    for path, own in sets.items():
        lineage = lineage_for_moments(layers.checkpoint, digest)
        lineage |= {"images": own.digest, "dtype": run.statistics.precision}
        embeddings = layers.embeddings()
        with torch.inference_mode():
            batches = (next(iter(tensors_by_name(batch).values())) for batch in own.batches(run.batch_size))
            streams = [embeddings(batch) for batch in batches]
        yield _Part(output=path, ids=own.ids, lineage=lineage, streams=streams, kept=kept)


def _refuse_memory(layers: DecoderLayers, parts: list[_Part], site_names: Collection[str], run: SequentialRun) -> None:
    """Raise BadInput if the first block's sums don't fit: all blocks are alike."""
    own = {name for name in site_names if name.startswith("blocks.0.")}
    block, sites = _load_block(
        layers, 0, run.device, own or {f"blocks.0.{name.split('.', 2)[2]}" for name in site_names}
    )
    shapes = shapes_of_sites(hooked_model(block), sites, example=parts[0].streams[0][:1], device=run.device)
    required_bytes = bytes_needed(shapes, attention_system=run.statistics.attention_system, kept={})
    streams = sum(x_BNC.nbytes for part in parts for x_BNC in part.streams)
    run.on_bytes_needed(sum(required_bytes.values()) + streams + sum(each.nbytes for each in block.parameters()))
    refuse_too_large(required_bytes, bytes_available(run.device))


def write_moments_by_block(
    layers: DecoderLayers, inputs: InputSet, run: SequentialRun, output: Path, *, hold_out: int | None, seed: int
) -> list[dict[str, Any]]:
    """Write the moments of a decoder's blocks to `output`, those of held-out sequences beside it; summarise each file.

    Files of finished blocks stay beside it until both files are written, so that the same call continues.

    Raises:
        BadInput: there is no site or too little memory.
    """
    site_names = {site.name for site in choose_sites(layers.checkpoint, run.statistics)}
    parts = list(_embed_parts(layers, inputs, run, output, hold_out=hold_out, seed=seed))
    _refuse_memory(layers, parts, site_names, run)
    indices = range(layers.arguments.decoder.layers)
    for index in indices:
        block, sites = _load_block(layers, index, run.device, site_names)
        for part in parts:
            _run_block(hooked_model(block), sites, part, index, run)
        del block, sites  # before the next one is read
        run.on_progress(index + 1)
    for part in parts:
        join_moments([path for path in map(part.of_block, indices) if path.exists()], part.output)
    summaries = [summary_of_moments(load_moments(part.output), part.output) for part in parts]
    for file in (part.output for part in parts):
        # The files of all blocks, those of interrupted runs with other settings too.
        for path in file.parent.glob(f"{glob.escape(file.stem)}.*.block*.partial.safetensors"):
            path.unlink(missing_ok=True)
    return summaries
