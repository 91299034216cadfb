"""The widths of timm's vision transformers, and the multiply-adds of their graphs."""

from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.counting import count_products
from corp_deploy.families.family import input_ports, sites_of
from corp_deploy.traced.models.pairs import TracedPairs
from corp_deploy.traced.models.sites import TracedChannels
from corp_deploy.traced.models.values import TracedValues


def first_widths(model: nn.Module) -> dict[str, int]:
    """Return the hidden channels and the dimensions of a head of the first block."""
    sites = sites_of(model).every
    mlp = next(site for site in sites if isinstance(site, TracedChannels))
    pairs = next(site for site in sites if isinstance(site, TracedPairs))
    values = next(site for site in sites if isinstance(site, TracedValues))
    return {"hidden": mlp.width, "qk": pairs.dims, "v": values.groups_HV.shape[1]}


def graph_macs(model: nn.Module) -> int:
    """Return the multiply-adds of the exported model, including zeros of padded heads."""
    return count_products(traced_model.exportable(model), input_ports(model)).macs
