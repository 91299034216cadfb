"""Calibrate as a command or a release asks for it, pass by pass, and write the moments of each part of the images."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calib import memory
from calib.calibrate import ALONE
from calib.distributed import Ranks
from calib.images import Images, parted
from calib.moments import Moments
from calib.resume import ResumeFile
from calib.store import load, save
from corp_deploy.store.checkpoint import Checkpoint
from ground import errors
from ground.errors import BadInput

from .calibrate import (
    Statistics,
    calibrate,
    chosen_sites,
    held_out_path,
    memory_needed,
    sparsity_that_fits,
    summary_of_moments,
)
from .kept_dims import kept_dims, kept_widths
from .method import PRESETS

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


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
    """What to take and how. Of the images `hold_out`, drawn by `seed`, have their moments apart."""

    wanted: Statistics
    restriction: Restriction | None = None
    batch_size: int
    device: str
    seed: int
    hold_out: int | None = None


@contextmanager
def _unseen(title: str, images: int) -> Iterator[Callable[[int], None]]:
    yield lambda done: None


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRun:
    """By which processes, and who hears what.

    States are saved every `save_every` images (None: never), in files whose names begin with the stem of `unfinished`.
    `needed` hears the bytes that the sums will take; `fitting` words the least sparsity that fits where all does not.
    """

    ranks: Ranks = ALONE
    unfinished: Path
    save_every: int | None = None
    needed: Callable[[int], None] = lambda size: None
    progress: Progress = _unseen
    fitting: Callable[[float], str]

    def state(self, *, first: bool = False) -> ResumeFile | None:
        """Of the pass that ranks, or of the one after it."""
        if self.save_every is None:
            return None
        name = f"{self.unfinished.stem}{'.first' if first else ''}.partial.safetensors"
        return ResumeFile(path=self.unfinished.with_name(name), every=self.save_every)

    def clear(self) -> None:
        """Remove the states, once what was made from them is safe."""
        for state in (self.state(first=True), self.state()):
            if state is not None:
                state.of_rank(self.ranks).clear()


def _refuse_too_large(
    checkpoint: Checkpoint, asked: CalibrationRequest, widths: Mapping[str, int], running: CalibrationRun
) -> None:
    """Raise BadInput when the sums won't fit, with a restriction whose sums do where there is one."""
    sites, available = chosen_sites(checkpoint, asked.wanted), memory.bytes_available(asked.device)
    needed = memory_needed(checkpoint, sites, asked.wanted, widths)
    running.needed(sum(needed.values()))
    try:
        memory.refuse_too_large(needed, available)
    except errors.BadInput as error:
        fits = None
        if asked.wanted.attention_system and asked.restriction is None:
            fits = sparsity_that_fits(checkpoint, sites, asked.wanted, PRESETS["corp"].align_head, available)
        if fits is None:
            raise
        what = f"what fits, for reductions of at least {fits:.0%} of each head: {running.fitting(fits)}"
        raise BadInput(f"{error}; {what}") from None


def _take(
    checkpoint: Checkpoint,
    images: Images,
    asked: CalibrationRequest,
    running: CalibrationRun,
    *,
    wanted: Statistics,
    title: str,
    saved: ResumeFile | None = None,
) -> Moments:
    """One pass."""
    with running.progress(title, len(running.ranks.share(images.count))) as done:
        return calibrate(
            checkpoint,
            images,
            batch_size=asked.batch_size,
            device=asked.device,
            wanted=wanted,
            saved=saved,
            ranks=running.ranks,
            done=done,
        )


def _restricted(
    checkpoint: Checkpoint,
    images: Images,
    asked: CalibrationRequest,
    running: CalibrationRun,
    widths: Mapping[str, int],
    title: str,
) -> Statistics:
    """What is wanted, with the dimensions that a first pass ranks highest."""
    assert asked.restriction is not None
    if asked.restriction.first is not None:
        first = load(asked.restriction.first)
    else:
        ranking, saved = Statistics(patterns=tuple(widths), precision=asked.wanted.precision), running.state(first=True)
        first = _take(checkpoint, images, asked, running, wanted=ranking, title=f"{title}.first", saved=saved)
    return replace(asked.wanted, kept=kept_dims(checkpoint.model, first, widths))


def _written(moments: Moments, path: Path, ranks: Ranks) -> list[dict[str, Any]]:
    """What the file holds, by the rank that writes it."""
    if ranks.rank != 0:
        return []
    save(moments, path)
    return [summary_of_moments(moments, path)]


def write_moments(
    checkpoint: Checkpoint, images: Images, asked: CalibrationRequest, running: CalibrationRun, output: Path
) -> list[dict[str, Any]]:
    """Write the moments to `output`, and those of held-out images beside it.

    Returns what each file holds, to the first rank alone. The states stay until `running.clear()`. Raises BadInput
    where there is no site or too little memory.
    """
    fitted, *held_out = [images] if asked.hold_out is None else parted(images, asked.hold_out, seed=asked.seed)
    wanted, widths, restriction = asked.wanted, dict[str, int](), asked.restriction
    if restriction is not None:
        sites = chosen_sites(checkpoint, wanted)
        widths = kept_widths(checkpoint.model, sites, restriction.sparsities, restriction.align_head)
    _refuse_too_large(checkpoint, asked, widths, running)
    if restriction is not None:
        wanted = _restricted(checkpoint, fitted, asked, running, widths, output.stem)
    # Held-out images are few: the passes over all the others are the ones worth going on with.
    parts = [(output, fitted, running.state()), *((held_out_path(output), part, None) for part in held_out)]
    summaries = []
    for path, part, saved in parts:
        moments = _take(checkpoint, part, asked, running, wanted=wanted, title=path.stem, saved=saved)
        summaries += _written(moments, path, running.ranks)
    return summaries
