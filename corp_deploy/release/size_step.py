"""How many calibration images a release would have done with. Everything heavy is imported here, as in own_steps."""

from calib.input_set import shuffled
from calib.store import load as load_moments
from corp_deploy.families.family import sites_of
from corp_deploy.families.widths import Width
from corp_deploy.invocation.merging import merging_from_options
from corp_deploy.planning.calibration_size import calibration_size
from corp_deploy.planning.merging import merging_checkpoint
from corp_deploy.planning.sweep_scores import scored_inputs
from corp_deploy.store.checkpoint import load_checkpoint
from corp_deploy.store.inputs import images_for_model
from ground.files import write_json

from .incremental import StageDirs
from .names import HELD_OUT_MOMENTS, MOMENTS, SIZE, snapshots_of
from .recipe import Recipe

MOST_JUDGED = 512
"""Held-out images, drawn by held_out.seed, that judge: all are held in memory at once."""


def write_size(dirs: StageDirs, recipe: Recipe) -> None:
    """The release's widths from the moments of ever more images, each fitted in one pass over them, judged on held-out
    images, and site by site on those that calibration.hold_out left out.
    """
    table, held_out, calibration = recipe.reduce, recipe.held_out, recipe.calibration
    dense = load_checkpoint(dirs.root / "dense")
    dense = merging_checkpoint(dense, merging_from_options(table.merging_of_statistics))
    judging = images_for_model(dense.model, held_out.images, samples=held_out.samples, seed=held_out.seed)
    if judging.count > MOST_JUDGED:
        judging = shuffled(judging, seed=held_out.seed).subset(range(MOST_JUDGED))
    size = calibration_size(
        dense.model,
        [load_moments(dirs.root / name) for name in (*snapshots_of(recipe), MOMENTS)],
        table.method,
        widths=_widths(dirs) if table.has_budget or table.heads == "auto" else None,
        held_out=None if calibration.hold_out is None else load_moments(dirs.root / HELD_OUT_MOMENTS),
        scored=scored_inputs(dense.model, judging, None, calibration.batch_size),
        calibration=images_for_model(dense.model, calibration.images, max_bad=calibration.max_bad),
    )
    write_json(dirs.into / SIZE, size.as_json())


def _widths(dirs: StageDirs) -> dict[str, Width]:
    """Those that were planned."""
    return {site.name: site.width for site in sites_of(load_checkpoint(dirs.root / "reduced").model).every}
