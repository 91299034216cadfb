"""corp-deploy inspect."""

from typing import Annotated

from corp_deploy.invocation.budget_choice import MACS, MOST_CUT, BudgetChoice
from corp_deploy.views.console import Output

from .command import command, some
from .model_choice import ModelChoice

PLANNED = f"Share of the MACs to keep, of which the plan tells what it takes of every site; default: {MACS}."


@command(first="model macs weights outputs trust-code json")
def inspect(model: ModelChoice, budget: Annotated[BudgetChoice, some("macs", macs=PLANNED)], out: Output) -> None:
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
