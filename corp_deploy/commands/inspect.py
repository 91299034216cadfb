"""corp-deploy inspect and corp-deploy inspect redundancy."""

from pathlib import Path
from typing import Annotated

import click

from corp_deploy.invocation.budget_choice import MACS, MOST_CUT, BudgetChoice
from corp_deploy.views.console import Output

from .command import command, some
from .model_choice import ModelChoice
from .options import FILE

PLANNED = f"Share of the MACs to keep, of which the plan tells what it takes of every site; default: {MACS}."


@command(first="model macs weights outputs trust-code json")
def inspect(model: ModelChoice, budget: Annotated[BudgetChoice, some("macs", macs=PLANNED)], out: Output) -> None:
    """Show what of a model can be reduced, and what a budget takes.

    Why the rest can't; its sites with their widths, parameters, MACs and preprocessing. No weights are needed.

    Example: corp-deploy inspect --model deit_small_patch16_224 --weights deit_small.safetensors
    """
    from corp_deploy.families.inspection import inspection_of_model
    from corp_deploy.invocation.reduction import ReduceOptions
    from corp_deploy.planning.refusals import first_plan
    from corp_deploy.views.inspection import (
        inspection_shown,
        preprocessing_record,
    )

    checkpoint, macs = model.look(out), budget.macs or MACS
    record = inspection_of_model(checkpoint.model) | preprocessing_record(checkpoint)
    plan = first_plan(checkpoint.model, ReduceOptions(macs=macs).method_asked, macs, MOST_CUT)
    record |= {"plan": plan.as_json()}
    out.result(record, *inspection_shown(checkpoint, record, plan))


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
    from corp_deploy.views.reduction import redundancy_plot, redundancy_tables
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
