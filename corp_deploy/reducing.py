"""Reduce a checkpoint from a moments file and write the smaller model with its lineage."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from calib.store import load as load_moments

from .checkpoint import Checkpoint, save
from .choices import Choices
from .files import sha256_of_file
from .inputs import model_digest
from .reduce import Reduction, SiteReport, reduce


def reduced_checkpoint(dense: Checkpoint, reduction: Reduction, *, preset: str, moments: Path) -> Checkpoint:
    """The reduced model with what led to it."""
    carried = load_moments(moments).lineage
    lineage = {
        "dense": model_digest(dense.model),
        "moments": sha256_of_file(moments),
        "images": carried["images"],
        "preprocessing": carried["preprocessing"],
        "preset": preset,
        "reduction": reduction.as_json(),
    }
    return Checkpoint(model=reduction.model, architecture=dense.architecture, lineage=lineage)


def reduce_checkpoint(
    dense: Checkpoint,
    moments: Path,
    choices: Choices,
    *,
    preset: str,
    directory: Path,
    done: Callable[[int], None] | None = None,
) -> Reduction:
    """Reduce and write; nothing is written unless all of it succeeds."""
    reduction = reduce(dense.model, load_moments(moments), choices, done=done)
    save(reduced_checkpoint(dense, reduction, preset=preset, moments=moments), directory)
    return reduction


def site_table(sites: Sequence[SiteReport]) -> Table:
    """Per site: width asked and got, and the share of the dense signal lost without and with the repair."""
    table = Table("site", "part", "dense", "asked", "got", "lost without repair", "lost", "condition")
    for site in sites:
        energy = site.energy or 1.0
        table.add_row(
            site.site,
            site.part,
            str(site.width_dense),
            f"{site.width_asked:g}",
            str(site.width),
            f"{site.error_uncompensated / energy:.2%}",
            f"{site.error / energy:.3%}",
            f"{site.condition:.1e}",
        )
    return table
