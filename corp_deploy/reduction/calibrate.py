"""Calibrate a checkpoint: calib's one pass at the sites of a vision transformer, by one process or under torchrun."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import Tensor, nn

from calib import calibrate as calib_calibrate
from calib.active import ACTIVE_EPS
from calib.calibrate import Snapshots
from calib.collect import Precision
from calib.distributed import Ranks, join_ranks, under_torchrun
from calib.inputs import InputSet
from calib.memory import bytes_needed, shapes_of_sites
from calib.moments import Moments
from calib.resume import ResumeFile
from calib.sites import Site
from corp_deploy.families import traced_model
from corp_deploy.families.family import example_of, listened, sites_of, token_weights
from corp_deploy.families.ineffective_options import refuse_idle_options, require_streams, taps_for
from corp_deploy.store.checkpoint import Checkpoint, on_device
from corp_deploy.store.inputs import lineage_for_moments
from corp_deploy.traced.models.module import device as device_of
from corp_deploy.traced.models.sites import calibration_taps
from ground.errors import BadInput

from .kept_dims import narrower
from .patch_memory import within_memory, without_streams

PIXEL_RANGE = "pixel_range"


@contextmanager
def _watched_range(model: nn.Module) -> Iterator[list[tuple[float, float]]]:
    """The least and largest input value of every forward pass while the context is open."""
    ranges: list[tuple[float, float]] = []

    def look(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        low, high = inputs[0].aminmax()
        ranges.append((float(low), float(high)))

    handle = model.register_forward_pre_hook(look)
    try:
        yield ranges
    finally:
        handle.remove()


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Which statistics to take: sites by glob pattern, attention or MLPs alone, CORP's per-image system.

    `kept` restricts that system to these dims per head, at these sites; see `kept_dims`. `patch_bytes`: of all sums,
    kept to by summing the patches of fewer channels where convolutions are largest; what reads streams is left out
    then, unless `residual`. `active_eps`: the magnitude above which an entry counts as active.
    """

    patterns: tuple[str, ...] = ()
    attention: bool = True
    attention_system: bool = False
    kept: Mapping[str, Tensor] | None = None
    precision: Precision = "float32"
    residual: bool = False
    patch_bytes: int | None = None
    active_eps: float = ACTIVE_EPS


def chosen_sites(checkpoint: Checkpoint, statistics: Statistics) -> list[Site]:
    """The model's sites that the statistics name. Raises BadInput where nothing is left, with the reason."""
    restricts = statistics.attention_system or statistics.kept is not None
    refuse_idle_options(checkpoint.model, "heads", {"--attention-system": restricts})
    sites = sites_of(checkpoint.model)
    every = calibration_taps(checkpoint.model, sites)
    if statistics.residual:
        require_streams(sites, type(checkpoint.model).__name__)
    if not every:
        reasons = "; ".join(f"{refusal.name}: {refusal.reason}" for refusal in sites.refused)
        raise BadInput(f"nothing to calibrate: no site of this model can be reduced ({reasons})")
    for pattern in statistics.patterns:
        if not any(fnmatchcase(site.name, pattern) for site in every):
            raise BadInput(f"--sites {pattern!r} fits no site; there are {', '.join(s.name for s in every[:4])}, ...")
    taps = every if statistics.attention else [each for each in every if each.name not in taps_for(sites, "heads")]
    named = [
        site for site in taps if not statistics.patterns or any(fnmatchcase(site.name, p) for p in statistics.patterns)
    ]
    if statistics.patch_bytes is None:
        return named
    requested = named if statistics.residual else without_streams(checkpoint.model, named)
    return within_memory(checkpoint.model, requested, statistics.patch_bytes)


def memory_needed(
    checkpoint: Checkpoint, sites: Sequence[Site], statistics: Statistics, widths: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Bytes that the sums of each site will take, known before the run; `widths` as the restricted system will have."""
    model = checkpoint.model
    shapes = shapes_of_sites(listened(model), sites, example=example_of(model), device=device_of(model))
    return bytes_needed(shapes, attention_system=statistics.attention_system and not widths, kept=widths)


def sparsity_that_fits(
    checkpoint: Checkpoint, sites: Sequence[Site], statistics: Statistics, align_head: int, available: int
) -> float | None:
    """The least sparsity for which the system, restricted to what it keeps, fits into so many bytes."""
    for sparsity, widths in narrower(checkpoint.model, sites, align_head):
        if sum(memory_needed(checkpoint, sites, statistics, widths).values()) <= available:
            return sparsity
    return None


def calibrate(
    checkpoint: Checkpoint,
    images: InputSet,
    *,
    batch_size: int,
    device: str = "cpu",
    statistics: Statistics | None = None,
    saved: ResumeFile | None = None,
    ranks: Ranks = calib_calibrate.ALONE,
    snapshots: Snapshots | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Moments:
    """The moments of the chosen sites, with the lineage that ties them to this model and these images.

    `saved` makes an interrupted run go on where it was; `snapshots` are given moments of the first images with their
    lineage. The checkpoint's model stays where it is; on another device a
    copy of it is run. Raises BadInput where there is no site or too little memory.
    """
    statistics = statistics or Statistics()
    there = on_device(checkpoint, device)
    sites = chosen_sites(there, statistics)
    options = calib_calibrate.Options(
        attention_system=statistics.attention_system and statistics.kept is None,
        kept=statistics.kept,
        eps=statistics.active_eps,
        precision=statistics.precision,
        token_weights=token_weights(there.model),
    )

    lineage, hooked_modules = lineage_for_moments(checkpoint, images), listened(there.model)

    def take(ranges: Sequence[tuple[float, float]] = ()) -> Moments:
        def of_first(count: int, moments: Moments) -> Moments:
            own = {"images": images.subset(range(count)).digest, **_range_told(ranges)}
            return replace(moments, lineage={**moments.lineage, **own})

        return calib_calibrate.calibrate(
            hooked_modules,
            sites,
            images,
            batch_size=batch_size,
            device=device,
            options=options,
            lineage=lineage,
            checkpoint=saved,
            ranks=ranks,
            snapshots=None if snapshots is None else snapshots.changed(of_first),
            progress=on_progress,
        )

    # A resumed run sees a part of the images and a GPU would be made to wait; the range is told where it is whole.
    pixels = traced_model.input_spec(there.model).medium == "images"
    if saved is not None or device != "cpu" or not pixels:
        return take()
    with _watched_range(hooked_modules) as ranges:
        moments = take(ranges)
    every = [pair for of_rank in ranks.all_gather(ranges) for pair in of_rank]
    return replace(moments, lineage={**moments.lineage, **_range_told(every)})


def _range_told(ranges: Sequence[tuple[float, float]]) -> dict[str, str]:
    if not ranges:
        return {}
    return {PIXEL_RANGE: f"{min(low for low, _ in ranges)!r}:{max(high for _, high in ranges)!r}"}


def ranks_of_this_run(device: str, *, timeout_s: float = 1800.0) -> AbstractContextManager[Ranks]:
    """The processes of torchrun when it started this one, else this process alone."""
    return join_ranks(device, timeout_s=timeout_s) if under_torchrun() else nullcontext(calib_calibrate.ALONE)
