"""Tests besides the links: of batches, of finite outputs, and of a shift of the inputs from those of calibration."""

from collections.abc import Mapping

import torch

from calib.collect import PIXEL_RANGE, Options, collect
from calib.moments import Moments
from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of, token_weigher
from corp_deploy.families.traced_model import hooked_model
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.input_sets import merging_of_moments
from corp_deploy.traced.models.sites import calibration_taps
from ground.errors import BadInput
from ground.feeds import Feeds, Outputs, batch_size, input_noun, iter_batches, select_rows, single_array
from perf.parity import structure
from perf.parity.shift import Scatter, Shift, Stats, shift_of_sites, site_shift
from perf.parity.structure import StructuralTest
from perf.parity.tolerance import Choices

from .candidates import Candidate, Run
from .own_noise import MergeNoise

# The largest number of batch slots, and of inputs with extreme values.
SLOTS, EXTREME_INPUTS = 8, 4


def run_structural_tests(
    candidate: Candidate,
    run: Run,
    feeds: Feeds,
    by_batch: Mapping[int, Outputs],
    bound: float,
    merges: MergeNoise | None,
) -> list[StructuralTest]:
    """Test that outputs don't depend on the slot, order or size of a batch, are finite, and survive extreme inputs."""
    largest, label = candidate.batch or max(by_batch), candidate.label
    slots, noun = min(largest, SLOTS), input_noun(feeds)
    if merges is not None:
        # Another batch size rounds differently and may merge other tokens: only inputs with clear margins are tested.
        firm_N = Choices(margins_N=merges.margins_N).stable_inputs(bound)
        if not len(firm_N):
            why = f"for all {noun}, rounding of {bound:.1g} may change the merged tokens, so batches are not tested"
            untested = StructuralTest(
                candidate=label, test="batch-slot", status="NOTED", value=0.0, bound=bound, reason=why
            )
            return [*structure.check_output_values(label, by_batch[max(by_batch)], noun=noun), untested]
        feeds = select_rows(feeds, firm_N)
        by_batch = {size: select_rows(rows, firm_N[firm_N < batch_size(rows)]) for size, rows in by_batch.items()}
        by_batch = {size: rows for size, rows in by_batch.items() if batch_size(rows)}
    straight = by_batch[max(by_batch)]
    some, extreme = slice(max(slots, 2)), select_rows(feeds, slice(min(slots, EXTREME_INPUTS)))
    return [
        structure.check_batch_slots(label, run, select_rows(feeds, slice(1)), batch=slots, bound=bound),
        structure.check_permutation(
            label, run, select_rows(feeds, some), bound=bound, straight=select_rows(straight, some)
        ),
        *structure.check_output_values(label, straight, noun=noun),
        *(() if candidate.takes_pixels else structure.check_extremes(label, run, extreme)),
        *structure.check_batch_sizes(label, by_batch, bound=bound, noun=noun),
    ]


PARTS, BATCH = 8, 16


def _stats(moments: Moments, name: str) -> Stats:
    """Return the mean and covariance of what enters a site's last layer, such as the projection of an attention."""
    mean, covariance = moments.sites[name].entering
    return Stats(images=moments.images, mean_F=mean.numpy(), covariance_FF=covariance.numpy())


def measure_shift(dense: Checkpoint, moments: Moments, feeds: Feeds) -> Shift | None:
    """Compare each site's mean and covariance on these inputs with those of calibration; None below PARTS inputs."""
    count = batch_size(feeds)
    if count < PARTS:
        return None
    merging = merging_of_moments(moments.lineage)
    model = dense.model if merging is None else traced_model.with_merging(dense.model, merging)
    sites = [site for site in calibration_taps(model, sites_of(model)) if site.name in moments.sites]
    each = count // PARTS
    scatter = {site.name: Scatter(_stats(moments, site.name).mean_F) for site in sites}
    options = Options(token_weights=token_weigher(model))
    for own in iter_batches(select_rows(feeds, slice(PARTS * each)), each):
        pieces = iter_batches(own, BATCH)
        batches = ({name: torch.from_numpy(array) for name, array in piece.items()} for piece in pieces)
        part = collect(hooked_model(model), sites, batches, device="cpu", options=options)
        for name, parts in scatter.items():
            parts.add(_stats(part, name))
    shifts = [site_shift(name, _stats(moments, name), parts) for name, parts in scatter.items()]
    return shift_of_sites(shifts, images=PARTS * each)


def check_input_range(moments: Moments, feeds: Feeds) -> list[StructuralTest]:
    """Test images for values outside the calibrated range; note if there are too few inputs to measure a shift.

    Measuring a shift takes PARTS inputs, to know its noise. The range is known if calibration ran on images.
    """
    count, noun, found = batch_size(feeds), input_noun(feeds), list[StructuralTest]()
    if count < PARTS:
        reason = f"{count} {noun} are too few to be compared with those of calibration; at least {PARTS} are needed"
        name = f"calibration {noun}"
        found.append(
            StructuralTest(candidate=name, test="shift", status="NOTED", value=count, bound=PARTS, reason=reason)
        )
    ranges = moments.lineage.get(PIXEL_RANGE)
    if ranges is None:
        return found
    try:
        lows, highs = zip(*(map(float, each.split(":")) for each in ranges.split("+")), strict=True)
    except ValueError:
        raise BadInput(f"moments: their pixel range is {ranges[:100]!r}, expected LOW:HIGH; run calibrate") from None
    return [
        *found,
        structure.check_calibrated_range("calibration images", single_array(feeds), low=min(lows), high=max(highs)),
    ]
