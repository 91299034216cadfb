"""Uniform sparsities and schedules of merged tokens that leave at most a share of a model's multiply-adds."""

from bisect import bisect_left
from typing import Literal

from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs, site_costs
from corp_deploy.families.family import sites_of
from corp_deploy.invocation.merging import MergingChoice
from corp_deploy.planning.request import merging_from_choice
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import uniform_widths
from ground.errors import BadInput

MOST_MERGED = 256


class Sparsities:
    """A search for the least uniform sparsity, in percent steps, that leaves at most a share of the dense MACs.

    Widths are rounded as by all presets.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.costs, self.dense = model, site_costs(model, "macs"), macs(model)

    def left(self, mlp: float, attention: float | None) -> float:
        """Return the share of the dense MACs that is left."""
        method = method_from_preset("none", mlp_sparsity=mlp, attention_sparsity=attention)
        widths = uniform_widths(self.model, method)
        return 1.0 - self.costs.saved(sites_of(self.model).every, widths) / self.dense

    def of(self, which: Literal["joint", "mlp"], share: float) -> float:
        """Return the sparsity of MLPs, and of Q/K if joint. Raises BadInput if none reaches the share."""
        for sparsity in (percent / 100 for percent in range(100)):
            if self.left(sparsity, sparsity if which == "joint" else None) <= share:
                return sparsity
        raise BadInput(f"no uniform {which} sparsity leaves {share:g} of the MACs; expected a larger share")


class Schedules:
    """A search for the fewest merged tokens, equal in all blocks or growing, that leave at most a share of the MACs.

    As in `reduce`, a block with too few tokens merges as many as it can.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.dense = model, macs(model)

    def left(self, text: str) -> float:
        """Return the share of the dense MACs that is left."""
        merging = merging_from_choice(MergingChoice(merge_tokens=text), self.model)
        return macs(traced_model.with_merging(self.model, merging)) / self.dense

    def of(self, which: Literal["each", "grow"], share: float) -> str:
        """Return the schedule as `--merge-tokens` takes it. Raises BadInput if none reaches the share."""
        texts = [f"{'grow:' if which == 'grow' else ''}{count}" for count in range(1, MOST_MERGED)]
        place = bisect_left(texts, True, key=lambda text: self.left(text) <= share)
        if place == len(texts):
            raise BadInput(
                f"merging {texts[-1]} tokens leaves more than {share:g} of the MACs; expected a larger share"
            )
        return texts[place]
