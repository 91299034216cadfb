"""Redundancy of a model before pruning: spectra of its sites' statistics, as in CORP's Table 9."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .moments import ChannelMoments, HeadMoments, Moments
from .patch_moments import PatchMoments
from .sites import SiteKind

KIND = "calib.redundancy"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelRedundancy:
    """Redundancy of a site's channels: `k95` directions have 95 % of the variance, `spectrum` is each one's share."""

    ratios: ClassVar = ("k95_ratio", "effective_rank_ratio")
    type: SiteKind
    site: str
    dim: int
    effective_rank: float
    k95: int
    activation_sparsity: float
    eps: float
    spectrum: tuple[float, ...]

    @property
    def effective_rank_ratio(self) -> float:
        return self.effective_rank / self.dim

    @property
    def k95_ratio(self) -> float:
        return self.k95 / self.dim


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRedundancy:
    """Redundancy of q and k at one site: directions of each head with 95 and 99 % of the energy of S_q^1/2 S_k^1/2.

    k is centred within each image.
    """

    ratios: ClassVar = ("k95_ratio", "k99_ratio")
    type: SiteKind = "attention"
    site: str
    dim: int
    effective_rank: tuple[float, ...]
    k95: tuple[int, ...]
    k99: tuple[int, ...]
    spectrum: tuple[tuple[float, ...], ...]

    @property
    def k95_ratio(self) -> float:
        return sum(self.k95) / len(self.k95) / self.dim

    @property
    def k99_ratio(self) -> float:
        return sum(self.k99) / len(self.k99) / self.dim


Redundancy = ChannelRedundancy | HeadRedundancy


def shares_from_energies(energy_D: Tensor) -> Tensor:
    sorted_D = energy_D.clamp(min=0).sort(descending=True).values
    total = sorted_D.sum()
    return sorted_D / total if total > 0 else sorted_D


def effective_rank(share_D: Tensor) -> float:
    """Return exp of the shares' entropy (Roy and Vetterli 2007); 0 where nothing varies."""
    positive = share_D[share_D > 0]
    return float(torch.exp(-(positive * positive.log()).sum())) if len(positive) else 0.0


def count_directions(share_D: Tensor, part: float) -> int:
    """Return how few of the shares, largest first, sum to `part` or more; 0 where nothing varies."""
    if not share_D.sum() > 0:
        return 0
    return min(int((share_D.cumsum(0) < part - 1e-12).sum()) + 1, len(share_D))


def _root(second_HDD: Tensor) -> Tensor:
    value_HD, vector_HDD = torch.linalg.eigh(second_HDD)
    root_HDD: Tensor = vector_HDD * value_HD.clamp(min=0).sqrt()[:, None, :] @ vector_HDD.mT
    return root_HDD


def _channel_redundancy(
    site: str, moments: ChannelMoments | PatchMoments, covariance: Tensor, active_share: Tensor
) -> ChannelRedundancy:
    share_F = shares_from_energies(torch.linalg.eigvalsh(covariance).flatten())
    return ChannelRedundancy(
        type=moments.kind,
        site=site,
        eps=moments.eps,
        dim=len(share_F),
        effective_rank=effective_rank(share_F),
        k95=count_directions(share_F, 0.95),
        activation_sparsity=1.0 - float(active_share.mean()),
        spectrum=tuple(share_F.tolist()),
    )


def _head_redundancy(site: str, moments: HeadMoments) -> HeadRedundancy:
    product_HDD = _root(moments.q_second_HDD) @ _root(moments.k_centred_HDD)
    shares = [shares_from_energies(singular_D**2) for singular_D in torch.linalg.svdvals(product_HDD)]
    return HeadRedundancy(
        site=site,
        dim=product_HDD.shape[-1],
        effective_rank=tuple(effective_rank(share_D) for share_D in shares),
        k95=tuple(count_directions(share_D, 0.95) for share_D in shares),
        k99=tuple(count_directions(share_D, 0.99) for share_D in shares),
        spectrum=tuple(tuple(share_D.tolist()) for share_D in shares),
    )


_REDUNDANCIES: Mapping[SiteKind, Callable[[str, Any], Redundancy]] = {
    "mlp": lambda site, own: _channel_redundancy(site, own, own.covariance_FF, own.active_share_F),
    "attention": _head_redundancy,
    "convolution": lambda site, own: _channel_redundancy(site, own, own.map_covariance_GCC, own.active_share_GC),
}


def redundancy_of_sites(moments: Moments) -> list[Redundancy]:
    return [_REDUNDANCIES[site.kind](name, site) for name, site in moments.sites.items()]


def record_from_redundancy(entries: list[Redundancy], lineage: Mapping[str, str]) -> dict[str, Any]:
    sites = [asdict(entry) | {name: getattr(entry, name) for name in entry.ratios} for entry in entries]
    return {"kind": KIND, "version": VERSION, "lineage": dict(lineage), "sites": sites}
