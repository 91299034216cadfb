"""corp-deploy calibrate --merge and corp-deploy inspect redundancy."""

from pathlib import Path

import click

from corp_deploy.views.console import Output

from .command import command
from .options import FILE


@command("calibrate --merge")
@click.argument("parts", nargs=-1, required=True, type=FILE)
@click.option("--output", "-o", type=FILE, required=True, help="Moments file to write.")
def merge_moments(parts: tuple[Path, ...], output: Path, out: Output) -> None:
    """Add the moments of separate calibrations.

    Refuses other models, other preprocessing and overlapping images.

    Example: corp-deploy calibrate --merge monday.safetensors tuesday.safetensors -o both.safetensors
    """
    from functools import reduce

    from calib.combination import merge
    from calib.store import load, save
    from corp_deploy.reduction.summary import summary_of_moments

    if len(parts) < 2:
        raise click.UsageError("one file is nothing to merge; give two or more")
    merged = reduce(merge, (load(path) for path in parts))
    save(merged, output)
    out.result(summary_of_moments(merged, output), f"{output}: {merged.images} images of {len(parts)} calibrations")


@command("inspect redundancy")
@click.option("--moments", type=FILE, required=True, help="Moments written by calibrate.")
@click.option("--output", "-o", type=FILE, default=None, help="Also write the record (.json) or its plot (.svg).")
def redundancy(moments: Path, output: Path | None, out: Output) -> None:
    """Show how far a model can go before anything is pruned.

    It shows effective ranks and how many dimensions hold the energy.

    Example: corp-deploy inspect redundancy --moments moments.safetensors -o redundancy.svg
    """
    from calib.redundancy import record_from_redundancy
    from calib.redundancy import redundancy as redundancy_of
    from calib.store import load
    from corp_deploy.views.moments import redundancy_plot, redundancy_tables
    from ground.files import write_json, write_text

    if output is not None and output.suffix not in (".json", ".svg"):
        raise click.BadParameter(f"{output}: expected .json or .svg", param_hint="--output")
    loaded = load(moments)
    entries = redundancy_of(loaded)
    record = record_from_redundancy(entries, loaded.lineage)
    if output is not None and output.suffix == ".json":
        write_json(output, record)
    elif output is not None:
        write_text(output, redundancy_plot(entries))
    out.result(record, *redundancy_tables(entries))
