"""Running float64 sums of one site, in which each token counts by its weight.

Shapes: B images, W windows of an image, N tokens, F MLP channels, H heads, D query/key dims, K kept dims, C channels of
z, T = D (D + 1) / 2.
"""

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import fields
from typing import Any, Generic, Self

import torch
from torch import Tensor

from .axes import SYMMETRIC, axes_of_name, shape_of, sum_names, triangle_size
from .causal import add_system_, add_target_, gram_of_planes, key_sums, present_tokens, sums_of_pairs
from .moments import ChannelMoments, HeadMoments, OneKind, SiteMoments
from .products import (
    Kernel,
    PassWeights,
    add_active_,
    add_gram_,
    add_sum_,
    grams_of_heads,
    mirror_,
    pass_weights,
    token_count,
    upper_triangle,
    weighted,
    weighted_by_root,
)
from .sites import Role


class RunningSums(Generic[OneKind]):
    """Running `totals` and `counts` of one kind's moments.

    `names`: optional sums to keep; `telling`: sums in which every NaN or Inf shows.
    """

    def __init__(self, kind: type[OneKind], counts: Iterable[str], telling: Iterable[str], *names: str) -> None:
        self._kind, self._names, self._telling = kind, (*sum_names(kind), *names), tuple(telling)
        self.counts: dict[str, float] = dict.fromkeys(counts, 0)
        self.kernel: Kernel = "blas"
        self.totals: dict[str, Tensor] = {}

    @property
    def tokens(self) -> float:
        return self.counts["tokens"]

    def allocate(self, sizes: Mapping[str, int], device: torch.device) -> None:
        for name in self._names:
            if name not in self.totals and sizes.keys() >= set(axes_of_name(name)):
                self.totals[name] = torch.zeros(shape_of(name, sizes), dtype=torch.float64, device=device)

    def add(self, role: Role, activation: Tensor, weights: PassWeights | None = None) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        """Add the products that wait until a batch is complete."""

    def is_finite(self) -> Tensor:
        totals = [(name, self.totals[name]) for name in self._telling]
        small = [each.diagonal(dim1=-2, dim2=-1) if name in SYMMETRIC else each for name, each in totals]
        return torch.stack([torch.isfinite(each).all() for each in small]).all()

    def load(self, moments: SiteMoments, device: torch.device) -> None:
        assert isinstance(moments, self._kind), moments
        self.counts = {name: getattr(moments, name) for name in self.counts}
        values = {field.name: getattr(moments, field.name) for field in fields(moments)}
        self.totals = {
            name: value.to(device, copy=True)
            for name, value in values.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }

    def constants(self) -> dict[str, Any]:
        """Return the fields of the moments that are no sums."""
        return {}

    def moments(self) -> OneKind:
        values: dict[str, Any] = {**self.constants(), **self.counts, **move_to_host(self.totals)}
        return self._kind(**values)

    def copied(self) -> Self:
        other = copy(self)
        other.totals = {name: total.clone() for name, total in self.totals.items()}
        other.counts = dict(self.counts)
        return other


def move_to_host(totals: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the sums by name on the CPU; symmetric ones are mirrored in place first."""
    moved = {}
    for name, total in totals.items():
        if name in SYMMETRIC:
            mirror_(total)
        if total.is_cuda:  # through page-locked memory, which torch reuses: three times as fast as fresh pages
            total = torch.empty(total.shape, dtype=total.dtype, pin_memory=True).copy_(total).clone()
        moved[name] = total.cpu()
    return moved


def _fold_windows(
    x: Tensor, weights: PassWeights | None, slots: PassWeights | None
) -> tuple[Tensor, PassWeights | None]:
    """Return x and weights; each window of [B,W,H,N,D] becomes an input, with weight 1 of present tokens, else 0."""
    if x.ndim == 4:
        return x, weights
    assert weights is None, x.shape
    if slots is None:
        return x.flatten(0, 1), None
    slots_WN = slots.weight_BN.to(x.device)
    assert slots_WN.shape == (x.shape[1], x.shape[3]), (slots_WN.shape, x.shape)
    slots_BWN = slots_WN.expand(len(x), *slots_WN.shape)
    return x.flatten(0, 1), PassWeights(weight_BN=slots_BWN.flatten(0, 1), total=len(x) * slots.total)


class ChannelSums(RunningSums[ChannelMoments]):
    def __init__(self, *, eps: float) -> None:
        super().__init__(ChannelMoments, ["tokens"], ["sum_F", "gram_FF"])
        self.eps = eps

    def add(self, role: Role, x_BNF: Tensor, weights: PassWeights | None = None) -> None:
        assert role == "x", role
        self.allocate({"F": x_BNF.shape[-1]}, x_BNF.device)
        add_sum_(self.totals["sum_F"], weighted(x_BNF, weights))
        add_active_(self.totals["active_F"], x_BNF, self.eps, None if weights is None else weights.weight_BN)
        add_gram_(self.totals["gram_FF"], weighted_by_root(x_BNF, weights), self.kernel)
        self.counts["tokens"] += token_count(x_BNF, weights)

    def constants(self) -> dict[str, Any]:
        return {"eps": self.eps}


class HeadSums(RunningSums[HeadMoments]):
    """Sums of q and k [B,H,N,D] and z [B,N,C]; with `system`, also of products of per-image Grams.

    Each window of [B,W,H,N,D] counts as an image. q or k is held until the other one comes; `flush` adds the system of
    a whole batch.
    """

    def __init__(
        self,
        *,
        system: bool,
        kept_HK: Tensor | None = None,
        slots_WN: Tensor | None = None,
        causal: bool = False,
        plane_scale: float | None = None,
    ) -> None:
        self.plane_scale = plane_scale if causal else None
        names = [] if self.plane_scale is None else ["plane_gram_HXX"]
        names += ["system_HTT"] if system else []
        names += [] if kept_HK is None else ["target_HKK", "target_energy_H"]
        telling = ["energy_HD", "q_sum_HD", "k_sum_HD", "z_sum_C", "zz_CC"]
        super().__init__(HeadMoments, ["images", "tokens"], telling, *names)
        self.system, self.kept_HK, self.causal = system, kept_HK, causal
        self._waiting: dict[Role, Tensor] = {}
        self._slots = None if slots_WN is None else pass_weights(slots_WN, slots_WN.device)
        self._grams: dict[Role, Tensor] = {}
        self._triangles: tuple[tuple[Tensor, Tensor], ...] = ()

    def add(self, role: Role, activation: Tensor, weights: PassWeights | None = None) -> None:
        if role == "z":
            self._add_outputs(activation, weights)
        elif self.causal:
            self._add_causal(role, activation, weights)
        else:
            x_BHND, weights = _fold_windows(activation, weights, self._slots)
            self._allocate_heads(x_BHND)
            self._grams[role] = (self._add_queries if role == "q" else self._add_keys)(x_BHND, weights)
            if len(self._grams) == 2:
                self._add_pairs(self._grams.pop("q"), self._grams.pop("k"))

    def _add_causal(self, role: Role, x_BHND: Tensor, weights: PassWeights | None) -> None:
        self._allocate_heads(x_BHND)
        self._waiting[role] = x_BHND
        if len(self._waiting) < 2:
            return
        q_BHND, k_BHND = self._waiting.pop("q"), self._waiting.pop("k")
        for q_HND, k_HND in present_tokens(q_BHND, k_BHND, weights):
            for name, of_pairs in sums_of_pairs(q_HND, k_HND).items():
                self.totals[name].add_(of_pairs)
            if self.plane_scale is not None:
                self.totals["plane_gram_HXX"].add_(gram_of_planes(q_HND, k_HND, self.plane_scale))
            if self.kept_HK is not None:
                sums_at = self.totals["target_HKK"], self.totals["target_energy_H"]
                add_target_(*sums_at, q_HND, k_HND, self.kept_HK)
                at_HNK = self.kept_HK.unsqueeze(1).expand(-1, q_HND.shape[1], -1)
                q_HND, k_HND = q_HND.gather(2, at_HNK), k_HND.gather(2, at_HNK)
            if self.system:
                add_system_(self.totals["system_HTT"], q_HND, k_HND)

    def _add_queries(self, q_BHND: Tensor, weights: PassWeights | None) -> Tensor:
        qq_BHDD = grams_of_heads(weighted_by_root(q_BHND, weights))
        self.totals["q_sum_HD"].add_(weighted(q_BHND, weights).float().sum(2).double().sum(0))
        self.totals["qq_HDD"].add_(qq_BHDD.sum(0))
        return qq_BHDD

    def _add_keys(self, k_BHND: Tensor, weights: PassWeights | None) -> Tensor:
        sum_BHD, kk_BHDD, centred_HDD = key_sums(k_BHND, weights)
        self.totals["k_sum_HD"].add_(sum_BHD.sum(0))
        self.totals["kk_HDD"].add_(kk_BHDD.sum(0))
        self.totals["kk_centred_HDD"].add_(centred_HDD)
        return kk_BHDD

    def _add_outputs(self, z_BNC: Tensor, weights: PassWeights | None) -> None:
        self.allocate({"C": z_BNC.shape[-1]}, z_BNC.device)
        add_sum_(self.totals["z_sum_C"], weighted(z_BNC, weights))
        add_gram_(self.totals["zz_CC"], weighted_by_root(z_BNC, weights), self.kernel)
        self.counts["images"] += z_BNC.shape[0]
        self.counts["tokens"] += token_count(z_BNC, weights)

    def _allocate_heads(self, x_BHND: Tensor) -> None:
        _, heads, _, dim = x_BHND.shape
        if self.kept_HK is not None:
            self.kept_HK = self.kept_HK.to(x_BHND.device)
        width = dim if self.kept_HK is None else self.kept_HK.shape[1]
        self.allocate({"H": heads, "D": dim, "X": dim, "K": width, "T": triangle_size(width)}, x_BHND.device)

    def _add_pairs(self, qq_BHDD: Tensor, kk_BHDD: Tensor) -> None:
        norms_BHD = qq_BHDD.diagonal(dim1=-2, dim2=-1) * kk_BHDD.diagonal(dim1=-2, dim2=-1)
        self.totals["energy_HD"].add_(norms_BHD.sum(0))
        if self.kept_HK is not None:
            qq_BHDD, kk_BHDD = self._restrict(self.kept_HK, qq_BHDD, kk_BHDD)
        if self.system:
            self._triangles += ((upper_triangle(kk_BHDD), upper_triangle(qq_BHDD)),)

    def _restrict(self, kept_HK: Tensor, qq_BHDD: Tensor, kk_BHDD: Tensor) -> tuple[Tensor, Tensor]:
        """Add the target sums over the removed dims P, and return the Grams of the kept dims S."""
        heads = torch.arange(len(kept_HK), device=kept_HK.device)[:, None]
        removed_HD = torch.ones_like(qq_BHDD[0, :, 0]).scatter_(1, kept_HK, 0.0)
        q_rows_BHKD = qq_BHDD[:, heads, kept_HK] * removed_HD[:, None]
        k_rows_BHKD = kk_BHDD[:, heads, kept_HK]
        self.totals["target_HKK"].add_((q_rows_BHKD @ k_rows_BHKD.mT).sum(0))
        both_BHDD = qq_BHDD * kk_BHDD
        self.totals["target_energy_H"].add_(torch.einsum("bhij,hi,hj->h", both_BHDD, removed_HD, removed_HD))
        kept_HKK = kept_HK[:, :, None], kept_HK[:, None, :]
        return qq_BHDD[:, heads[..., None], *kept_HKK], kk_BHDD[:, heads[..., None], *kept_HKK]

    def flush(self) -> None:
        if self._triangles:
            k_BHT, q_BHT = (torch.cat(parts) for parts in zip(*self._triangles, strict=True))
            self._triangles = ()
            total_HTT = self.totals["system_HTT"]
            torch.baddbmm(total_HTT, k_BHT.permute(1, 2, 0), q_BHT.transpose(0, 1), out=total_HTT)

    def constants(self) -> dict[str, Any]:
        return {"kept_HK": None if self.kept_HK is None else self.kept_HK.cpu()}
