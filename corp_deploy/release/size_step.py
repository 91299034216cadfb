"""How many calibration images a release needs. Everything heavy is imported here, as in release_steps."""

import torch

from calib.groups import split_by_mask
from calib.inputs import shuffled
from calib.store import load as load_moments
from corp_deploy.families.family import sites_of
from corp_deploy.families.widths import Width
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
"""Held-out images, drawn by their seed, that judge: all are held in memory at once."""


def write_size(dirs: StageDirs, recipe: Recipe) -> None:
    """The release's widths from the moments of ever more images, each fitted in one pass over them, judged on held-out
    images, and site by site on those that calibration.hold_out left out.
    """
    choice, calibration, drawn_by = recipe.reduce.choice, recipe.calibration, recipe.proof_images.seed
    dense = load_checkpoint(dirs.root / "dense")
    dense = merging_checkpoint(dense, choice.of_statistics)
    proving = recipe.proof_images.proving_images(dense.model)
    judging = proving if proving.count <= MOST_JUDGED else shuffled(proving, seed=drawn_by).subset(range(MOST_JUDGED))
    images = images_for_model(dense.model, calibration.images, max_bad=calibration.max_bad)
    if recipe.proves_on_own:
        images, _ = split_by_mask(images, torch.isin(images.ids, proving.ids))
    size = calibration_size(
        dense.model,
        [load_moments(dirs.root / name) for name in (*snapshots_of(recipe), MOMENTS)],
        choice.method_asked,
        widths=_widths(dirs) if choice.allocates or choice.auto_heads else None,
        held_out=load_moments(dirs.root / HELD_OUT_MOMENTS) if recipe.judges_sites else None,
        scored=scored_inputs(dense.model, judging, None, calibration.batch_size),
        calibration=images,
    )
    write_json(dirs.into / SIZE, size.as_json())


def _widths(dirs: StageDirs) -> dict[str, Width]:
    """Those that were planned."""
    return {site.name: site.width for site in sites_of(load_checkpoint(dirs.root / "reduced").model).every}
