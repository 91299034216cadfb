"""The merging of tokens that the options request."""

from dataclasses import replace

from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.invocation.merging import MergedStatistics
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.traced.models.merging import Merging, capped, schedule_from_text
from ground.errors import BadInput


def merging_from_choice(choice: MergedStatistics, model: nn.Module) -> Merging | None:
    """What a model merges as it was asked for, None where nothing was. Where one number stands for all blocks, a block
    merges no more than it can. Raises BadInput for a text that is no schedule of its blocks.
    """
    text = choice.schedule
    if text is None:
        return None
    if choice.auto_merging:
        raise BadInput(
            "--merge-tokens auto chooses for a budget what each block merges away; give reduce --macs with it, or "
            "say how many tokens: 12 in each block, grow:36"
        )
    kinds = traced_model.token_kinds(model)
    schedule = schedule_from_text(text, traced_model.depth(model))
    if "," not in text:
        schedule = capped(schedule, choice.merge_how, len(kinds), len(kinds) - kinds.count("patch"))
    return merging_of_schedule(choice, schedule)


def merging_of_schedule(choice: MergedStatistics, schedule: tuple[int, ...]) -> Merging:
    """All but the schedule as it was asked for."""
    return Merging(schedule=schedule, metric=choice.merge_metric, how=choice.merge_how, unmerged=choice.unmerged)


def merging_checkpoint(checkpoint: Checkpoint, choice: MergedStatistics) -> Checkpoint:
    """The checkpoint with a model that merges as asked for; itself where nothing was asked for."""
    return merging_as_planned(checkpoint, merging_from_choice(choice, checkpoint.model))


def merging_as_planned(checkpoint: Checkpoint, merging: Merging | None) -> Checkpoint:
    """The checkpoint with a model that merges as a plan has settled; itself where the plan left that alone."""
    if merging is None:
        return checkpoint
    return replace(checkpoint, model=traced_model.with_merging(checkpoint.model, merging))
