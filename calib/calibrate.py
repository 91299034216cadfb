"""A whole calibration by one process or several, which resumes to the same bits and takes snapshots on its way."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import msgspec

from ground.errors import BadInput
from ground.records import record_from_text

from .collect import Collector
from .distributed import Ranks
from .fingerprints import Fingerprints
from .inputs import Inputs, InputSet, ReadBatch
from .memory import bytes_available, bytes_needed, refuse_too_large, shapes_of_sites
from .moments import Moments
from .products import Kernel
from .store import load_moments, save_moments

STATE, VERSION = "calib.resume", 1
_REMEDY = "remove the file to start afresh"


def refuse_other_run(where: str, saved: Mapping[str, str], run: Mapping[str, str]) -> None:
    for key in sorted({*run, *saved}):
        if run.get(key) != saved.get(key):
            raise BadInput(
                f"{where}: {key} was {saved.get(key)!r}, now {run.get(key)!r}; {_REMEDY}, or repeat the interrupted "
                "run's options"
            )


class ResumeState(msgspec.Struct, frozen=True, kw_only=True):
    """An unfinished calibration: next position, errors of `bad` inputs, Gram kernel, and options of the `run`."""

    position: int
    bad: tuple[str, ...]
    kernel: Kernel
    run: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeFile:
    """The checkpoint of a calibration, saved after every `every` images; each process has its own file."""

    path: Path
    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise BadInput(f"checkpoint every: got {self.every} images, expected at least 1")

    def of_rank(self, ranks: Ranks) -> "ResumeFile":
        if ranks.size == 1:
            return self
        name = f"{self.path.stem}.rank{ranks.rank}of{ranks.size}{self.path.suffix}"
        return replace(self, path=self.path.with_name(name))

    def save(self, moments: Moments, progress: ResumeState) -> None:
        state = json.dumps({"kind": STATE, "version": VERSION, **msgspec.to_builtins(progress)}, sort_keys=True)
        save_moments(replace(moments, lineage={**moments.lineage, STATE: state}), self.path)

    def load(self, run: Mapping[str, str]) -> tuple[Moments, ResumeState] | None:
        if not self.path.exists():
            return None
        moments = load_moments(self.path, remedy=_REMEDY)
        if STATE not in moments.lineage:
            raise BadInput(f"{self.path}: holds moments, not a calibration's checkpoint; give another checkpoint path")
        state = record_from_text(
            moments.lineage[STATE],
            ResumeState,
            where=f"{self.path}: not a calibration's checkpoint",
            kind=STATE,
            version=VERSION,
            remedy=_REMEDY,
        )
        refuse_other_run(f"{self.path}: checkpoint of another run", state.run, run)
        return moments, state

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """Snapshots of the moments of the first n inputs for every n of `counts`; `write` must copy what it gets.

    `written` tells a resumed run whether a snapshot still exists. Raises BadInput for counts that don't ascend from 1.
    """

    counts: tuple[int, ...]
    write: Callable[[int, Moments], None]
    written: Callable[[int], bool] = lambda _: True

    def __post_init__(self) -> None:
        refuse_counts(self.counts)

    def changed(self, change: Callable[[int, Moments], Moments]) -> "Snapshots":
        return replace(self, write=lambda count, moments: self.write(count, change(count, moments)))


def refuse_counts(counts: tuple[int, ...]) -> None:
    if not counts or counts[0] < 1 or any(one >= other for one, other in pairwise(counts)):
        raise BadInput(f"snapshots: got {', '.join(map(str, counts)) or 'none'}, expected ascending counts from 1")


ALONE = Ranks()


class _Share:
    """The inputs of one rank, and the progress of its calibration; `span` is None for batches of unknown number."""

    def __init__(
        self,
        collector: Collector,
        inputs: InputSet,
        span: range | None,
        checkpoint: ResumeFile | None,
        snapshots: Snapshots | None,
    ) -> None:
        self.collector, self.inputs, self.checkpoint, self.snapshots = collector, inputs, checkpoint, snapshots
        self.first = 0 if span is None else span.start
        self.stop = None if span is None else span.stop
        self.position, self.bad = self.first, list[str]()

    def resume(self, run: Mapping[str, str]) -> None:
        saved = self.checkpoint.load(run) if self.checkpoint else None
        if saved:
            moments, progress = saved
            self.collector.resume_from(moments, progress.kernel)
            self.position, self.bad = progress.position, list(progress.bad)
            for count in self.snapshots.counts if self.snapshots else ():
                if self.snapshots and count <= self.position and not self.snapshots.written(count):
                    raise BadInput(
                        f"snapshot of the first {count}: its file is missing, and the interrupted run is past it; put "
                        "it back, or remove the checkpoint to start again"
                    )

    def take(self, batch: ReadBatch[Inputs], run: Mapping[str, str]) -> None:
        before = self.collector.images
        self.collector.update(batch)
        self.position = batch.end
        self.bad.extend(batch.bad)
        if self.snapshots and self.position in self.snapshots.counts:
            self.snapshots.write(self.position, self.collector.moments({}))
        if self.checkpoint and before // self.checkpoint.every < self.collector.images // self.checkpoint.every:
            kernel = self.collector.kernel
            assert kernel is not None
            state = ResumeState(position=self.position, bad=tuple(self.bad), kernel=kernel, run=run)
            self.checkpoint.save(self.collector.moments({}), state)

    def take_snapshots(self, end: int, batch_size: int) -> None:
        """Write the snapshots whose counts lie inside the next batch, from a copy of the sums."""
        if not self.snapshots:
            return
        for count in [count for count in self.snapshots.counts if self.position < count < end]:
            with self.collector.in_copy():
                for part in self.inputs.read(batch_size, first=self.position, stop=count, bad=self.bad):
                    self.collector.update(part)
                self.snapshots.write(count, self.collector.moments({}))

    def run(self, batch_size: int, run: Mapping[str, str], progress: Callable[[int], None] | None) -> None:
        self.resume(run)
        pin = self.collector.device.type == "cuda"
        rest = self.inputs.read(batch_size, first=self.position, stop=self.stop, bad=self.bad, pin=pin)
        with self.collector:
            for batch in rest if self.stop is None or self.position < self.stop else ():
                self.take_snapshots(batch.end, batch_size)
                self.take(batch, run)
                if progress:
                    progress(self.position - self.first)
        self.collector.refuse_nonfinite()


def refuse_too_many_sums(collector: Collector, example: Inputs, copies: int = 1) -> None:
    """Raise BadInput if `copies` of a collector's sums exceed the free memory; `example` are inputs of one batch."""
    device, options = str(collector.device), collector.options
    shapes = shapes_of_sites(collector.model, collector.sites, example=example, device=device)
    kept = {name: kept_HK.shape[1] for name, kept_HK in (options.kept or {}).items()}
    needed = bytes_needed(shapes, attention_system=options.attention_system, kept=kept)
    refuse_too_large({name: copies * size for name, size in needed.items()}, bytes_available(device))


def _sum_over_ranks(collector: Collector, ranks: Ranks) -> None:
    for sums in collector.sums.values():
        ranks.all_reduce([sums.totals[name] for name in sorted(sums.totals)])
    counts = ranks.all_gather([sums.counts for sums in collector.sums.values()])
    for index, sums in enumerate(collector.sums.values()):
        sums.counts = {name: sum(of_rank[index][name] for of_rank in counts) for name in sums.counts}
    collector.images = sum(ranks.all_gather(collector.images))
    collector.fingerprints = Fingerprints.concatenated(ranks.all_gather(collector.fingerprints))
    ends = [ends for ends in ranks.all_gather(collector.pixel_range or ()) if ends]
    if ends:
        collector.pixel_range = min(low for low, _ in ends), max(high for _, high in ends)


def _raise_on_all_ranks(share: _Share, ranks: Ranks, problem: str) -> None:
    if not problem and not share.collector.images and ranks.size > 1:
        problem = f"none of its {share.position - share.first} {share.inputs.noun} is readable; use fewer processes"
    ranks.raise_first_problem(problem)
    share.inputs.refuse_bad([reason for bad in ranks.all_gather(tuple(share.bad)) for reason in bad])


def calibrate_sites(
    collector: Collector,
    inputs: InputSet,
    *,
    batch_size: int,
    lineage: Mapping[str, str],
    checkpoint: ResumeFile | None = None,
    ranks: Ranks = ALONE,
    snapshots: Snapshots | None = None,
    progress: Callable[[int], None] | None = None,
) -> Moments:
    """Return the moments of a new collector's sites over `inputs`, on every rank; one rank should write them.

    A run with `checkpoint` resumes to the same bits; the file stays until `checkpoint.of_rank(ranks).clear()`.
    `snapshots` are for one process. Raises BadInput on every rank for bad inputs and activations and for sums that
    exceed the memory; RankLost when another rank has ended.
    """
    lineage = {**lineage, "dtype": collector.options.precision}
    data = inputs.digest if checkpoint else ""
    run = {**lineage, "data": data, "batch_size": str(batch_size), "options": collector.options.as_text(),
           "ranks": f"{ranks.rank} of {ranks.size}"}  # fmt: skip
    if snapshots:
        snapshots = snapshots.changed(lambda _, moments: replace(moments, lineage={**moments.lineage, **lineage}))
        run["snapshots"] = ",".join(map(str, snapshots.counts))
    counts = snapshots.counts if snapshots else ()  # a count inside a batch needs a copy of the sums
    copies = 2 if any(count % batch_size and count < inputs.count for count in counts) else 1
    own = checkpoint.of_rank(ranks) if checkpoint else None
    share = _Share(collector, inputs, ranks.share(inputs.count) if inputs.is_identified else None, own, snapshots)
    problem = ""
    try:
        refuse_too_many_sums(collector, inputs.example(), copies)
        share.run(batch_size, run, progress)
    except BadInput as error:
        if ranks.size == 1:
            raise
        problem = str(error)
    _raise_on_all_ranks(share, ranks, problem)
    if ranks.size > 1:
        _sum_over_ranks(collector, ranks)
    return collector.moments(lineage)
