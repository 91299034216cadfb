"""Attentions with merged heads: queries, keys and values of the mean rows of clusters, fitted to what those give.

A softmax of mean rows is not the mean of softmaxes, so that no moment of the dense model tells what folded heads give;
see judged_folds.py.

Legend: H heads, M clusters, D rows of a head, I inputs, C = H V inputs of the projection, K = M V, O outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from calib.moments import HeadMoments
from corp_deploy.algebra.fold import cluster_rows
from corp_deploy.algebra.whole_heads import averages, recovered
from corp_deploy.families.head_site import HeadSite
from corp_deploy.families.modules import with_modules
from corp_deploy.families.widths import HeadWidths

from .judged_folds import Fitted
from .method import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedHeads:
    """See FoldedModules. `dense` is the whole layer."""

    refits: bool
    site: HeadSite
    dense: nn.Module
    map_MH: Tensor
    plain_OK: Tensor
    bias_O: Tensor
    foretold: Fitted

    def modules(self, weight_OK: Tensor, bias_O: Tensor) -> Mapping[str, nn.Module]:
        needs_bias = self.site.last.bias is not None or bool(bias_O.any())
        first, bias = self.site.first.weight.detach(), self.site.first.bias
        module, _ = self.site.placed(
            HeadWidths(qk=self.site.qk, v=self.site.v, heads=len(self.map_MH)),
            self.site.geometry,
            (self._averaged(first), None if bias is None else self._averaged(bias.detach())),
            (weight_OK, bias_O if needs_bias else None),
        )
        return {self.site.name: module.eval()}

    def _averaged(self, rows: Tensor) -> Tensor:
        """The rows (or biases) of queries, keys and values, each the mean over a cluster of heads, in float64."""
        sizes = [self.site.heads * width for width in (self.site.qk, self.site.qk, self.site.v)]
        parts = (part.reshape(self.site.heads, -1) for part in rows.double().split(sizes))
        return torch.cat([(self.map_MH @ part).reshape(-1, *rows.shape[1:]) for part in parts])

    def last(self, modules: Mapping[str, nn.Module]) -> nn.Linear:
        last = modules[self.site.name].get_submodule("proj")
        assert isinstance(last, nn.Linear), self.site.name
        return last

    def layer(self, modules: Mapping[str, nn.Module]) -> nn.Module:
        return with_modules(self.dense, self.site.name, dict(modules))


def _rows_by_head(site: HeadSite) -> Tensor:
    """All that makes a head of the fused projection, side by side [H, X]."""
    weight, bias = site.first.weight.detach().double(), site.first.bias
    whole = weight if bias is None else torch.cat((weight, bias.detach().double().unsqueeze(1)), dim=1)
    sizes = [site.heads * width for width in (site.qk, site.qk, site.v)]
    return torch.cat([part.reshape(site.heads, -1) for part in whole.split(sizes)], dim=1)


def folded_heads(site: HeadSite, dense: nn.Module, moments: HeadMoments, method: Method, count: int) -> FoldedHeads:
    """Merge one attention's heads into `count`; `dense` is the whole layer."""
    map_MH = averages(cluster_rows(_rows_by_head(site), count, seed=0), count)
    bias_O = None if site.last.bias is None else site.last.bias.detach().double()
    given = moments.z_mean_C, moments.z_second_CC, site.last.weight.detach().double(), bias_O, map_MH
    plain = recovered(*given, "none", ridge_rel=method.ridge_rel)
    foretold = recovered(*given, "gram" if method.heads_recovery == "gram" else "none", ridge_rel=method.ridge_rel)
    return FoldedHeads(
        refits=method.heads_recovery == "affine",
        site=site,
        dense=dense,
        map_MH=map_MH,
        plain_OK=plain.weight_OK,
        bias_O=plain.bias_O,
        foretold=(foretold.weight_OK, foretold.bias_O, foretold.condition, foretold.ridge),
    )
