"""Count what a whole model costs; budgets are shares of it."""

from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs, parameters
from corp_deploy.traced.models.sites import Currency


def dense_cost(model: nn.Module, currency: Currency) -> int:
    """MACs of one image, or parameters, of the whole dense model, counted."""
    return macs(model) if currency == "macs" else parameters(model)


def cost_of_all_tokens(model: nn.Module, currency: Currency) -> int:
    """The same, were no tokens merged: what shares are of."""
    merges = traced_model.merging_of(model) is not None
    return dense_cost(traced_model.with_merging(model, None) if merges else model, currency)
