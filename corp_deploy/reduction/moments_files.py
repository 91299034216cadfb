"""Files of moments: calibration as a command or a release asks for it, pass by pass.

The moments of each part of the images are written, held-out ones in a file of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calib import memory
from calib.calibrate import ALONE, ResumeFile, Snapshots
from calib.combination import merge_lineage, merge_moments
from calib.distributed import Ranks
from calib.groups import UNGROUPED
from calib.images import Images
from calib.inputs import InputSet
from calib.moments import Moments
from calib.sites import PatchTaps
from calib.splits import split_for_calibration
from calib.store import load_moments, save_moments
from corp_deploy.store.checkpoint import Checkpoint
from ground.errors import BadInput, is_out_of_memory
from ground.outputs import require_space
from ground.transaction import replacing_files

from .calibrate import (
    Statistics,
    calibrate,
    choose_sites,
    kept_dims,
    kept_widths,
    memory_needed,
    sparsity_that_fits,
)
from .calibration_warnings import few_pictures_advice, warnings_of_moments
from .method import PRESETS
from .moments import summary_of_moments
from .overfitting import estimate_overfitting
from .snapshots import SUMS_HELD, SnapshotFiles, groups_of_moments, moments_in_splits, refuse_snapshots

FIRST, HALVES = ".first", (".half1", ".half2")
STATES = (FIRST, *HALVES, "")
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def held_out_path(moments: Path) -> Path:
    """Return the path of the moments of held-out images: beside those of the rest."""
    return moments.with_name(f"{moments.stem}.held-out{moments.suffix}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restriction:
    """A limit of CORP's per-image system to the dimensions that `reduce` keeps at these sparsities.

    The moments in the file `first` rank the dimensions; without it a pass is taken first to rank them.
    """

    sparsities: tuple[float, ...]
    align_head: int | None = None
    first: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """The statistics to take, and the division of the images.

    The moments of `hold_out` images, drawn by `seed`, are kept apart. `groups` says which images belong together (see
    calib.splits): moments are then kept of two halves that split no group, and held-out images are whole groups. For
    groups that nobody gave there are no halves.
    """

    statistics: Statistics
    restriction: Restriction | None = None
    batch_size: int
    device: str
    seed: int
    hold_out: int | None = None
    groups: str | None = None

    @property
    def halves(self) -> bool:
        """True if moments of two halves are asked for."""
        return self.groups not in (None, UNGROUPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRun:
    """The processes of a calibration, its unfinished states, and its callbacks.

    States are saved every `save_every` images (None: never), in files whose names begin with the stem of `unfinished`.
    The moments of the first `snapshots` images, ascending, are written beside those of all. `on_bytes_needed` receives
    the bytes that the sums will take. `fitting` words the advice to restrict the per-image system to a sparsity, for
    the message when memory is too small. `smaller` receives each smaller batch size that is tried after memory ran out.
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
        """Return the state file of the pass over all images, or of a pass named by `FIRST` or one of `HALVES`."""
        if self.save_every is None:
            return None
        name = f"{self.unfinished.stem}{part}.partial.safetensors"
        return ResumeFile(path=self.unfinished.with_name(name), every=self.save_every)

    @property
    def _states(self) -> list[ResumeFile]:
        return [state.of_rank(self.ranks) for state in map(self.state, STATES) if state is not None]

    @property
    def goes_on(self) -> bool:
        """True if an interrupted run left a state."""
        return any(state.path.exists() for state in self._states)

    def clear(self) -> None:
        """Remove the states, once their results are safe."""
        for state in self._states:
            state.clear()
        self.files(self.unfinished).clear()

    def files(self, output: Path) -> SnapshotFiles:
        return SnapshotFiles(output=output, counts=self.snapshots)

    def copies(self, request: CalibrationRequest, images: InputSet) -> int:
        """Return the number of copies of one pass's sums that are in memory at once."""
        inside = any(count % request.batch_size and count < images.count for count in self.snapshots)
        return (SUMS_HELD if request.halves and request.device == "cpu" else 1) + inside


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    checkpoint: Checkpoint
    request: CalibrationRequest
    run: CalibrationRun
    output: Path

    def refuse_too_large(self, images: InputSet, widths: Mapping[str, int]) -> None:
        """Raise BadInput if memory is too small for the sums, Missing if the disk is.

        The message names a restriction whose sums fit, if there is one.
        """
        checkpoint, request, run, statistics = self.checkpoint, self.request, self.run, self.request.statistics
        sites, available = choose_sites(checkpoint, statistics), memory.bytes_available(request.device)
        copies, needed = run.copies(request, images), memory_needed(checkpoint, sites, statistics, widths)
        bytes_needed = {name: copies * size for name, size in needed.items()}
        run.on_bytes_needed(sum(bytes_needed.values()))
        files = 1 + len(run.snapshots) + (request.hold_out is not None)
        stored = sum(needed.values()) / 2 * (2 if request.halves else 1)  # one half of symmetric sums is stored
        require_space(self.output, stored * files, what="the moments take")
        try:
            memory.refuse_too_large(bytes_needed, available)
        except BadInput as error:
            if statistics.patch_bytes is None and any(site.kind == PatchTaps.kind for site in sites):
                less = f"--patch-memory {0.9 * available / copies / 1e9:.2g}"
                raise BadInput(f"{error}, (d) {less} sums patches of fewer channels at large convolutions") from None
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
        """Take one pass; begin again with batches of half the size if memory ran out before anything was saved.

        A pass with smaller batches saves no states, as the same command, with its own batch size, could not continue
        from them.
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
                if not is_out_of_memory(error) or size == 1 or run.ranks.size > 1 or run.goes_on or images.reads_once:
                    raise
            size //= 2  # outside of the handler, whose error holds the large batch's memory
            run.smaller(size)

    def restricted(self, images: InputSet, restriction: Restriction, widths: Mapping[str, int]) -> Statistics:
        """Return the requested statistics, restricted to the dimensions that a first pass ranks highest."""
        statistics = self.request.statistics
        if restriction.first is not None:
            first = load_moments(restriction.first)
        else:
            ranking = Statistics(patterns=tuple(widths), precision=statistics.precision)
            first = self.take(images, ranking, f"{self.output.stem}.first", self.run.state(FIRST))
        return replace(statistics, kept=kept_dims(self.checkpoint.model, first, widths))

    def fitted(self, images: InputSet, groups_B: Tensor | None, statistics: Statistics) -> Moments:
        """Return the moments of the images that are fitted to; with groups, take a pass over each half.

        Snapshots of the first images are written on the way.
        """
        name, files = self.output.stem, self.run.files(self.output)
        if groups_B is None:
            return self.take(images, statistics, name, self.run.state(), files.of_pass())
        snapshots = files.of_splits(images, groups_B, self.request.seed)

        def take(half: InputSet, number: int) -> Moments:
            state = self.run.state(HALVES[number])
            return self.take(half, statistics, f"{name}, half {number + 1}", state, snapshots[number])

        return moments_in_splits(images, groups_B, take, seed=self.request.seed)


def _written(moments: Moments, path: Path, ranks: Ranks, *, gone: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Write the moments on the first rank and summarise the file; remove the files beside it named in `gone`."""
    if ranks.rank != 0:
        return []
    with replacing_files(path.parent, (path.name,), removed=gone) as (temporary,):
        save_moments(moments, temporary)
    return [summary_of_moments(moments, path)]


def save_with_warnings(checkpoint: Checkpoint, moments: Moments, output: Path) -> dict[str, Any]:
    """Write the moments of one pass, and return the summary of the file with warnings about the inputs."""
    (summary,) = _written(moments, output, ALONE)
    warnings = warnings_of_moments(checkpoint.model, moments)
    return summary | ({"warnings": warnings} if warnings else {})


def merge_files(parts: Sequence[Path], output: Path) -> dict[str, Any]:
    """Add the moments in files, of which there may be one, write the sum to `output`, and return its summary.

    Raises:
        BadInput: there is no file, they are of different models, preprocessing or statistics, or an image
            is in two of them.
    """
    if not parts:
        raise BadInput("moments to merge: got no file, expected one for each part of the calibration")
    every = [load_moments(path) for path in parts]
    for later, moments in enumerate(every):
        merge_lineage(every[0].lineage, moments.lineage)
        for earlier in range(later):
            if common := int(torch.isin(moments.image_ids, every[earlier].image_ids).sum()):
                raise BadInput(
                    f"moments to merge: {parts[earlier]} and {parts[later]} both have {common} of the same images, "
                    "which would count twice; leave one of them out, or calibrate on images that do not overlap"
                )
    merged = every[0]
    for path, moments in zip(parts[1:], every[1:], strict=True):
        try:
            merged = merge_moments(merged, moments)
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from None
    (summary,) = _written(merged, output, ALONE)
    without = [path for path, moments in zip(parts, every, strict=True) if moments.half is None]
    if 0 < len(without) < len(parts):
        summary["warnings"] = [
            f"{without[0]} has no halves of groups of images, so {output} has none, and reduce chooses no ridges by "
            "them; calibrate every part with the same --groups"
        ]
    return summary


def write_moments(
    checkpoint: Checkpoint, images: InputSet, request: CalibrationRequest, run: CalibrationRun, output: Path
) -> list[dict[str, Any]]:
    """Write the moments to `output`, and those of held-out images beside it.

    The states stay until `run.clear()`.

    Returns:
        The summary of each file, on the first rank only.

    Raises:
        BadInput: there is no site or too little memory.
    """
    if run.snapshots or request.restriction is not None:
        images = images.identified()
    parts = split_for_calibration(images, hold_out=request.hold_out, groups=request.groups, seed=request.seed)
    refuse_snapshots(run.snapshots, parts.fitted, run.ranks)
    passes = _Passes(checkpoint=checkpoint, request=request, run=run, output=output)
    statistics, widths, restriction = request.statistics, dict[str, int](), request.restriction
    if restriction is not None:
        sites = choose_sites(checkpoint, statistics)
        widths = kept_widths(checkpoint.model, sites, restriction.sparsities, restriction.align_head)
    passes.refuse_too_large(parts.fitted, widths)
    if restriction is not None:
        statistics = passes.restricted(parts.fitted, restriction, widths)
    moments = passes.fitted(parts.fitted, None if parts.found_by else parts.groups_B, statistics)
    if parts.found_by and parts.groups_B is not None:
        moments = replace(moments, group_ids=groups_of_moments(moments, parts.fitted, parts.groups_B))
    # An older file of held-out moments is removed: its images may be among those fitted to now.
    gone = () if parts.held_out is None else (held_out_path(output).name,)
    summaries = _written(moments, output, run.ranks, gone=gone)
    if summaries and run.snapshots:
        summaries[0]["snapshots"] = run.files(output).summaries()
    if summaries:
        warnings = warnings_of_moments(checkpoint.model, moments, images.noun)
        summaries[0] |= {"warnings": warnings} if warnings else {}
    if summaries and images.noun == Images.noun and (advice := few_pictures_advice(moments)):
        summaries[0]["advice"] = advice
    if summaries and parts.found_by:
        summaries[0]["groups"] = {"count": len(moments.group_ids.unique()), "found_by": parts.found_by}
    if summaries and (gap := estimate_overfitting(checkpoint.model, moments)) is not None:
        summaries[0]["overfitting"] = gap.as_json()
    if parts.held_out is not None:
        # Held-out images are few: only the passes over all the others are worth continuing.
        path = held_out_path(output)
        summaries += _written(passes.take(parts.held_out, statistics, path.stem), path, run.ranks)
    return summaries
