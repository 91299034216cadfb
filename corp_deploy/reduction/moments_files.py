"""Files of moments: calibrate as a command or a release asks for it, pass by pass, and write what each part of the
images gives, held-out ones in a file of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from calib import memory
from calib.calibrate import ALONE, ResumeFile, Snapshots
from calib.distributed import Ranks
from calib.groups import split_inputs
from calib.inputs import InputSet
from calib.moments import Moments
from calib.sites import PatchTaps
from calib.store import load_moments, save_moments
from corp_deploy.store.checkpoint import Checkpoint
from ground.errors import BadInput, is_out_of_memory
from ground.outputs import require_space
from ground.transaction import replacing_files

from .calibrate import (
    Statistics,
    calibrate,
    chosen_sites,
    kept_dims,
    kept_widths,
    memory_needed,
    sparsity_that_fits,
)
from .calibration_warnings import few_inputs, range_warning
from .method import PRESETS
from .moments import summary_of_moments
from .overfitting import overfitting
from .snapshots import SUMS_HELD, SnapshotFiles, in_splits, refuse_snapshots

FIRST, HALVES = ".first", (".half1", ".half2")
STATES = (FIRST, *HALVES, "")
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def held_out_path(moments: Path) -> Path:
    """Where the moments of held-out images stand: beside those of the rest."""
    return moments.with_name(f"{moments.stem}.held-out{moments.suffix}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restriction:
    """CORP's per-image system for what `reduce` keeps at these sparsities alone. The moments in `first` rank; without
    them a pass before does.
    """

    sparsities: tuple[float, ...]
    align_head: int | None = None
    first: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """What to take and how. Of the images `hold_out`, drawn by `seed`, have their moments apart. `groups` says which
    belong together (see calib.groups): the moments are then kept of two halves that split none, and held-out images
    are whole groups.
    """

    statistics: Statistics
    restriction: Restriction | None = None
    batch_size: int
    device: str
    seed: int
    hold_out: int | None = None
    groups: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRun:
    """By which processes, and who hears what.

    States are saved every `save_every` images (None: never), in files whose names begin with the stem of `unfinished`.
    The moments of the first `snapshots` images, ascending, are written beside those of all. `on_bytes_needed` hears the
    bytes that the sums will take; `fitting` words the least sparsity that fits where all does not; `smaller` hears of
    each batch size that is taken instead, where memory ran out in a larger one.
    """

    ranks: Ranks = ALONE
    unfinished: Path
    save_every: int | None = None
    snapshots: tuple[int, ...] = ()
    on_bytes_needed: Callable[[int], None] = lambda size: None
    progress: Progress = lambda title, images: nullcontext(lambda count: None)
    fitting: Callable[[float], str]
    smaller: Callable[[int], None] = lambda size: None

    def state(self, part: str = "") -> ResumeFile | None:
        """Of the pass over all, or of the one that ranks, or of the one over a half."""
        if self.save_every is None:
            return None
        name = f"{self.unfinished.stem}{part}.partial.safetensors"
        return ResumeFile(path=self.unfinished.with_name(name), every=self.save_every)

    @property
    def _states(self) -> list[ResumeFile]:
        return [state.of_rank(self.ranks) for state in map(self.state, STATES) if state is not None]

    @property
    def goes_on(self) -> bool:
        """Whether an interrupted run left a state."""
        return any(state.path.exists() for state in self._states)

    def clear(self) -> None:
        """Remove the states, once what was made from them is safe."""
        for state in self._states:
            state.clear()
        self.files(self.unfinished).clear()

    def files(self, output: Path) -> SnapshotFiles:
        """Of the snapshots."""
        return SnapshotFiles(output=output, counts=self.snapshots)

    def copies(self, request: CalibrationRequest, images: InputSet) -> int:
        """How many times what one pass sums is held at once."""
        inside = any(count % request.batch_size and count < images.count for count in self.snapshots)
        return (SUMS_HELD if request.groups is not None and request.device == "cpu" else 1) + inside


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """What a request takes of a model."""

    checkpoint: Checkpoint
    request: CalibrationRequest
    run: CalibrationRun
    output: Path

    def refuse_too_large(self, images: InputSet, widths: Mapping[str, int]) -> None:
        """Raise BadInput when the sums won't fit, with a restriction whose sums do where there is one, and Missing when
        the disk is too full for them.
        """
        checkpoint, request, run, statistics = self.checkpoint, self.request, self.run, self.request.statistics
        sites, available = chosen_sites(checkpoint, statistics), memory.bytes_available(request.device)
        copies, needed = run.copies(request, images), memory_needed(checkpoint, sites, statistics, widths)
        bytes_needed = {name: copies * size for name, size in needed.items()}
        run.on_bytes_needed(sum(bytes_needed.values()))
        files = 1 + len(run.snapshots) + (request.hold_out is not None)
        stored = sum(needed.values()) / 2 * (2 if request.groups else 1)  # of symmetric sums one half is stored
        require_space(self.output, stored * files, what="the moments take")
        try:
            memory.refuse_too_large(bytes_needed, available)
        except BadInput as error:
            if statistics.patch_bytes is None and any(site.kind == PatchTaps.kind for site in sites):
                less = f"--patch-memory {0.9 * available / copies / 1e9:.2g}"
                raise BadInput(f"{error}, (d) {less}: patches of the largest convolutions of fewer channels") from None
            fits = None
            if statistics.attention_system and request.restriction is None:
                fits = sparsity_that_fits(checkpoint, sites, statistics, PRESETS["corp"].align_head, available)
            if fits is None:
                raise
            what = f"what fits, for reductions of at least {fits:.0%} of each head: {run.fitting(fits)}"
            raise BadInput(f"{error}; {what}") from None

    def take(
        self,
        images: InputSet,
        statistics: Statistics,
        title: str,
        saved: ResumeFile | None = None,
        snapshots: Snapshots | None = None,
    ) -> Moments:
        """One pass; begun anew with batches of half the size where memory ran out and nothing was saved yet. That saves
        no states, which are of the size that was asked for: the same command could not go on from them.
        """
        run, size = self.run, self.request.batch_size
        while True:
            try:
                with run.progress(title, len(run.ranks.share(images.count))) as on_progress:
                    return calibrate(
                        self.checkpoint,
                        images,
                        batch_size=size,
                        device=self.request.device,
                        statistics=statistics,
                        saved=saved if size == self.request.batch_size else None,
                        ranks=run.ranks,
                        snapshots=snapshots,
                        on_progress=on_progress,
                    )
            except Exception as error:
                if not is_out_of_memory(error) or size == 1 or run.ranks.size > 1 or run.goes_on:
                    raise
            size //= 2  # not while the error holds what the large one took
            run.smaller(size)

    def restricted(self, images: InputSet, restriction: Restriction, widths: Mapping[str, int]) -> Statistics:
        """What is wanted, with the dimensions that a first pass ranks highest."""
        statistics = self.request.statistics
        if restriction.first is not None:
            first = load_moments(restriction.first)
        else:
            ranking = Statistics(patterns=tuple(widths), precision=statistics.precision)
            first = self.take(images, ranking, f"{self.output.stem}.first", self.run.state(FIRST))
        return replace(statistics, kept=kept_dims(self.checkpoint.model, first, widths))

    def fitted(self, images: InputSet, groups_B: Tensor | None, statistics: Statistics) -> Moments:
        """The moments of the images that are fitted to, of groups by a pass over either half of these; snapshots of the
        first ones are written on the way.
        """
        name, files = self.output.stem, self.run.files(self.output)
        if groups_B is None:
            return self.take(images, statistics, name, self.run.state(), files.of_pass())
        snapshots = files.of_splits(images, groups_B, self.request.seed)

        def take(half: InputSet, number: int) -> Moments:
            state = self.run.state(HALVES[number])
            return self.take(half, statistics, f"{name}, half {number + 1}", state, snapshots[number])

        return in_splits(images, groups_B, take, seed=self.request.seed)


def _written(moments: Moments, path: Path, ranks: Ranks, *, gone: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What the file holds, by the rank that writes it; files beside it called `gone` go as it comes."""
    if ranks.rank != 0:
        return []
    with replacing_files(path.parent, (path.name,), removed=gone) as (temporary,):
        save_moments(moments, temporary)
    return [summary_of_moments(moments, path)]


def write_moments(
    checkpoint: Checkpoint, images: InputSet, request: CalibrationRequest, run: CalibrationRun, output: Path
) -> list[dict[str, Any]]:
    """Write the moments to `output`, and those of held-out images beside it.

    Returns what each file holds, to the first rank alone. The states stay until `run.clear()`. Raises BadInput
    where there is no site or too little memory.
    """
    parts = split_inputs(images, hold_out=request.hold_out, groups=request.groups, seed=request.seed)
    refuse_snapshots(run.snapshots, parts.fitted, run.ranks)
    passes = _Passes(checkpoint=checkpoint, request=request, run=run, output=output)
    statistics, widths, restriction = request.statistics, dict[str, int](), request.restriction
    if restriction is not None:
        sites = chosen_sites(checkpoint, statistics)
        widths = kept_widths(checkpoint.model, sites, restriction.sparsities, restriction.align_head)
    passes.refuse_too_large(parts.fitted, widths)
    if restriction is not None:
        statistics = passes.restricted(parts.fitted, restriction, widths)
    moments = passes.fitted(parts.fitted, parts.groups_B, statistics)
    # What an older run held out may be among the images of these.
    gone = () if parts.held_out is None else (held_out_path(output).name,)
    summaries = _written(moments, output, run.ranks, gone=gone)
    if summaries and run.snapshots:
        summaries[0]["snapshots"] = run.files(output).summaries()
    if summaries:
        warnings = [range_warning(checkpoint.model, images), few_inputs(moments, images.noun)]
        summaries[0] |= {"warnings": list(filter(None, warnings))} if any(warnings) else {}
    if summaries and (gap := overfitting(checkpoint.model, moments)) is not None:
        summaries[0]["overfitting"] = gap.as_json()
    if parts.held_out is not None:
        # Held-out images are few: the passes over all the others are the ones worth going on with.
        path = held_out_path(output)
        summaries += _written(passes.take(parts.held_out, statistics, path.stem), path, run.ranks)
    return summaries
