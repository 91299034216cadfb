"""corp-deploy inspect."""

import click

from corp_deploy.invocation.budget_choice import MACS, MOST_CUT, BudgetChoice
from corp_deploy.views.console import Output

from .declared import record_options
from .help import Command
from .model_choice import ModelChoice, model_options
from .options import output_options


@click.command(cls=Command, first="model macs weights outputs trust-code json")
@model_options
@record_options(
    "budget",
    BudgetChoice,
    "macs",
    macs=f"Share of the MACs to keep, of which the plan tells what it takes of every site; default: {MACS}.",
)
@output_options
def inspect(model: ModelChoice, budget: BudgetChoice, out: Output) -> None:
    """Show what of a model can be reduced, and what a budget takes.

    Why the rest can't; its sites with their widths, parameters, MACs and preprocessing. No weights are needed.

    Example: corp-deploy inspect --model deit_small_patch16_224 --weights deit_small.safetensors
    """
    from corp_deploy.families.inspection import inspection_of_model
    from corp_deploy.invocation.reduction import ReduceOptions
    from corp_deploy.planning.reach import first_plan
    from corp_deploy.views.inspection import (
        inspection_table,
        merging_lines,
        output_lines,
        plan_lines,
        preprocessing_line,
        preprocessing_record,
        refusal_lines,
        size_line,
        stay_lines,
    )

    checkpoint, macs = model.look(out), budget.macs or MACS
    record = inspection_of_model(checkpoint.model) | preprocessing_record(checkpoint)
    plan = first_plan(checkpoint.model, ReduceOptions(macs=macs).method_asked, macs, MOST_CUT)
    record |= {"plan": plan.as_json()}
    about = (*refusal_lines(record), *output_lines(record), *merging_lines(record), *stay_lines(record))
    lines = (*about, size_line(record), preprocessing_line(checkpoint), *plan_lines(plan))
    out.result(record, inspection_table(record), *lines)
