"""corp-deploy inspect."""

import click

from corp_deploy.views.console import Output
from ground.quantity import SHARE_KEPT

from .help import Command
from .model_choice import ModelChoice, model_options
from .options import output_options
from .value import Value


@click.command(cls=Command, first="model macs weights outputs trust-code json")
@model_options
@click.option(
    "--macs",
    type=Value(SHARE_KEPT),
    default=0.7,
    show_default=True,
    help="Share of the MACs to keep, of which the plan tells what it takes of every site.",
)
@output_options
def inspect(model: ModelChoice, macs: float, out: Output) -> None:
    """Show what of a model can be reduced, and what a budget takes.

    Why the rest can't; its sites with their widths, parameters, MACs and preprocessing. No weights are needed.

    Example: corp-deploy inspect --model deit_small_patch16_224 --weights deit_small.safetensors
    """
    from corp_deploy.families.inspection import inspection_of_model
    from corp_deploy.invocation.budget_choice import MOST_CUT
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

    checkpoint = model.look(out)
    record = inspection_of_model(checkpoint.model) | preprocessing_record(checkpoint)
    plan = first_plan(checkpoint.model, ReduceOptions(macs=macs).method_asked, macs, MOST_CUT)
    record |= {"plan": plan.as_json()}
    about = (*refusal_lines(record), *output_lines(record), *merging_lines(record), *stay_lines(record))
    lines = (*about, size_line(record), preprocessing_line(checkpoint), *plan_lines(plan))
    out.result(record, inspection_table(record), *lines)
