"""The layers of a model that can be k:n sparse, their weights as rows of groups, and the report on each.

The groups of a linear layer run along its inputs, those of a convolution along the input channels at each place of the
kernel, as TensorRT counts them (developer guide, Structured Sparsity).

Legend: B inputs, N tokens or places, G groups of a convolution (1 of a linear layer), O rows of one, K their inputs, R
channels of a group, T places of a kernel.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from calib.patch_sums import patches_of_map
from corp_deploy.spec.sparsity import SparseKind, Sparsity, Target
from corp_deploy.store.weight_fit import rows_of_weight
from corp_deploy.traced.finding.site_groups import Kind, SiteGroups
from corp_deploy.traced.models.layers import ProgramLayer, input_block_of

from .coverage import by_reason

Layer = nn.Linear | nn.Conv2d
_OF_SITES: Mapping[SparseKind, frozenset[Kind]] = {
    "head": frozenset({"queries and keys", "values"}),
    "mlp": frozenset({"channels", "gated channels"}),
    "conv": frozenset({"convolution channels", "stream"}),
}
"""The kinds of sites by option; a layer of several kinds belongs to the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsePlace:
    """A layer that can be sparse: its name in the model, and its `path` in the program that runs.

    `uses` counts the calls of its weight. `site`: a site that only this layer reads, whose channels may be reordered,
    but only within runs of `block` neighbouring inputs.
    """

    name: str
    path: str
    kind: SparseKind
    layer: Layer
    uses: int = 1
    block: int = 0
    site: SiteGroups | None = None

    @property
    def groups(self) -> int:
        return 1 if isinstance(self.layer, nn.Linear) else self.layer.groups

    @property
    def summed(self) -> int:
        """The length of a row that is cut into groups of n: a linear layer's inputs, a convolution group's channels."""
        layer = self.layer
        return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels // layer.groups

    def reason(self, sparsity: Sparsity) -> str:
        """Return why the layer can't be sparse, or an empty text."""
        layer = self.layer
        if not layer.weight.numel():
            return "nothing is left of it"
        if self.uses > 1:
            return f"its weight is used {self.uses} times"
        if self.groups > 1 and self.summed == 1:
            return "a depthwise convolution sums over one channel at each place"
        each = " of each of its groups" if self.groups > 1 else ""
        if self.summed < sparsity.of:
            return f"it sums over {self.summed} channels{each}, fewer than {sparsity.of}"
        if self.summed % sparsity.of:
            return f"it sums over {self.summed} inputs{each}, no multiple of {sparsity.of}"
        return ""

    def weight_rows(self) -> Tensor:
        """Return the weight in float64 [G,O,K], the members of each k:n group side by side."""
        rows_OK = rows_of_weight(self.layer.weight).flatten(1).double()
        return rows_OK.view(self.groups, -1, rows_OK.shape[1])

    def entering(self, x: Tensor) -> Tensor:
        """Return the layer's input as [G,N,K], which `weight_rows` multiply; of a convolution the patches."""
        layer = self.layer
        if isinstance(layer, nn.Linear):
            return x.reshape(1, -1, layer.in_features)
        u_BNGU = patches_of_map(x, layer)
        u_GXU = u_BNGU.flatten(0, 1).transpose(0, 1)
        return u_GXU.reshape(self.groups, -1, self.summed, layer.weight[0, 0].numel()).transpose(2, 3).flatten(2)

    def leaving(self, y: Tensor) -> Tensor:
        """Return the layer's output as [G,N,O], one number for each of `weight_rows`."""
        layer = self.layer
        if isinstance(layer, nn.Linear):
            return y.reshape(1, -1, layer.out_features)
        y_XO = y.flatten(2).transpose(1, 2).flatten(0, 1)
        return y_XO.view(len(y_XO), self.groups, -1).transpose(0, 1)

    @torch.no_grad()
    def fill_(self, weight_GOK: Tensor, bias_GO: Tensor) -> None:
        """Set the layer's weight and bias from float64 rows, rounded to the model's type; zeros stay zero."""
        weight_OK = weight_GOK.flatten(0, 1)
        if isinstance(self.layer, nn.Conv2d):
            weight_OK = weight_OK.view(len(weight_OK), -1, self.summed).transpose(1, 2).flatten(1)
        self.layer.weight.copy_(weight_OK.view_as(self.layer.weight))
        if self.layer.bias is not None:
            self.layer.bias.copy_(bias_GO.flatten())


def sparse_places_of_program(
    model: nn.Module,
    program: nn.Module,
    layers: Iterable[ProgramLayer],
    kinds: Mapping[SparseKind, Sparsity],
) -> Iterator[SparsePlace]:
    """Yield the layers that write or read sites of these kinds; of kind `conv` the convolutions only."""
    for each in layers:
        layer = program.get_submodule(each.path)
        assert isinstance(layer, nn.Linear | nn.Conv2d), each
        kind = next((kind for kind, of_sites in _OF_SITES.items() if each.kinds & of_sites), None)
        is_other = kind == "conv" and isinstance(layer, nn.Linear)
        if kind is not None and kind in kinds and not is_other:
            place = SparsePlace(name=each.name, path=each.path, kind=kind, layer=layer, uses=each.uses)
            if isinstance(layer, nn.Linear) and (read := input_block_of(model, each.weight)) is not None:
                place = replace(place, site=read[0], block=read[1])
            yield place


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSparsity:
    """A layer of the model by its path, with its pattern such as 2:4, or without one and the `reason`.

    Errors are mean squares per token on the calibration inputs between the layer's output and its target: with the
    unchanged weights (`error_dense`), with some set to zero and no refit (`error_masked`), and after the refit.
    `energy` is the target's variance. `macs`: multiply-adds of one input, zeros counted.
    """

    layer: str
    kind: str
    pattern: str = ""
    reason: str = ""
    reordered: bool = False
    energy: float = 0.0
    error_dense: float = 0.0
    error_masked: float = 0.0
    error: float = 0.0
    macs: int = 0
    macs_of_zeros: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsityReport:
    """Every layer of the requested kinds, in the order they run."""

    rule: str
    permute: str
    target: Target
    layers: tuple[LayerSparsity, ...]

    @property
    def patterns(self) -> dict[str, str]:
        """The pattern of each layer that has one."""
        return {each.layer: each.pattern for each in self.layers if each.pattern}

    @property
    def macs(self) -> int:
        """The multiply-adds of the sparse layers, zeros counted."""
        return sum(each.macs for each in self.layers if each.pattern)

    @property
    def macs_of_zeros(self) -> int:
        """The multiply-adds with zeros, which a sparse kernel skips; engines use one where it is faster."""
        return sum(each.macs_of_zeros for each in self.layers)

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values; sparse MACs stand apart from the model's own, which zeros don't reduce."""
        layers = [asdict(each) for each in self.layers]
        own = {"rule": self.rule, "permute": self.permute, "target": self.target}
        return own | {"sparse_macs": self.macs, "macs_of_zeros": self.macs_of_zeros, "layers": layers}

    def sentences(self) -> Iterator[str]:
        sparse = [each for each in self.layers if each.pattern]
        patterns = ", ".join(dict.fromkeys(each.pattern for each in sparse))
        lost = fmean(each.error / (each.energy or 1.0) for each in sparse)
        masked = fmean(each.error_masked / (each.energy or 1.0) for each in sparse)
        yield (
            f"{patterns} sparse: {len(sparse)} of {len(self.layers)} layers, their mean error {lost:.2%} of what they "
            f"give, {masked:.2%} before the refit"
        )
        yield (
            f"zeros: {self.macs_of_zeros / 1e6:,.1f} M of the sparse layers' {self.macs / 1e6:,.1f} M MACs, which "
            "engines skip only where they pick sparse kernels; no other MACs take them off"
        )
        for reason, names in by_reason({each.layer: each.reason for each in self.layers if each.reason}):
            yield f"{names} not sparse: {reason}"
        for pattern in dict.fromkeys(each.pattern for each in sparse if each.pattern != "2:4"):
            yield f"{pattern}: for analysis, no engine has kernels for it; 2:4 has"
