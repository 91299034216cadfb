"""Second-order statistics of named sites as plain float64 sums, so that merging two calibrations is addition.

Shapes: F MLP hidden channels; H heads; D query/key dims per head; K kept dims per head; C channels of z, the input of
the attention's output projection (all heads together); T = D (D + 1) / 2, the entries on and above the diagonal of a
D x D matrix in row-major order (torch.triu_indices), not scaled by sqrt(2).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ground.errors import BadInput

from .axes import refuse_impossible, shape_of, triangle_size
from .fingerprints import Fingerprints, no_ids
from .patch_moments import PatchMoments
from .sites import SiteKind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChannelMoments:
    """Sums over tokens of x, the input of an MLP's last linear layer; `active_F` counts |x| > eps.

    Each token counts by its weight; `tokens` is the sum of weights.
    """

    kind: ClassVar[SiteKind] = "mlp"
    system_width: ClassVar[int | None] = None
    tokens: float
    eps: float
    sum_F: Tensor
    gram_FF: Tensor
    active_F: Tensor

    def __post_init__(self) -> None:
        refuse_impossible(self, {"F": self.sum_F.shape[-1]})

    @property
    def entering(self) -> tuple[Tensor, Tensor]:
        return self.mean_F, self.covariance_FF

    @property
    def mean_F(self) -> Tensor:
        return self.sum_F / self.tokens

    @property
    def second_FF(self) -> Tensor:
        return self.gram_FF / self.tokens

    @property
    def covariance_FF(self) -> Tensor:
        """Covariance E[x x^T] - E[x] E[x]^T over all tokens."""
        return self.second_FF.addr_(self.mean_F, self.mean_F, alpha=-1)

    @property
    def active_share_F(self) -> Tensor:
        """Share of tokens where |x| > eps, by channel."""
        return self.active_F / self.tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadMoments:
    """Sums over images and tokens of q and k before the dot product's scale, and of z; tokens count by their weights.

    qq_HDD = sum of q q^T; kk_centred_HDD centres k within each image; energy_HD = sum over images of ||q||^2
    ||k||^2 of a dim. A window counts as an image; causal attention sums over pairs that see each other (see causal.py).

    system_HTT = sum over images of upper(K'K) upper(Q'Q)^T is CORP's per-image system (eq. 15). With `kept_HK` (sorted
    dims S of each head) it covers those dims only, and target_HKK = (Q_S'Q_P)(K_P'K_S) and target_energy_H = <Q_P'Q_P,
    K_P'K_P> describe the removed dims P. plane_gram_HXX: see gram_of_planes.
    """

    kind: ClassVar[SiteKind] = "attention"
    images: int
    tokens: float
    q_sum_HD: Tensor
    k_sum_HD: Tensor
    qq_HDD: Tensor
    kk_HDD: Tensor
    kk_centred_HDD: Tensor
    energy_HD: Tensor
    z_sum_C: Tensor
    zz_CC: Tensor
    system_HTT: Tensor | None = None
    kept_HK: Tensor | None = None
    target_HKK: Tensor | None = None
    target_energy_H: Tensor | None = None
    plane_gram_HXX: Tensor | None = None

    def __post_init__(self) -> None:
        heads, dim, channels = (*self.q_sum_HD.shape[-2:], self.z_sum_C.shape[-1])
        width = dim
        if self.kept_HK is not None:
            width = self.kept_HK.shape[-1]
            if self.kept_HK.dtype != torch.int64 or self.kept_HK.shape[0] != heads or self.system_HTT is None:
                raise BadInput(
                    f"HeadMoments.kept_HK: got {list(self.kept_HK.shape)}, expected int64 [{heads},K] and system_HTT"
                )
        sizes = {"H": heads, "D": dim, "X": dim, "C": channels, "K": width, "T": triangle_size(width)}
        for name in ("target_HKK", "target_energy_H"):
            if self.kept_HK is not None and getattr(self, name) is None:
                raise BadInput(f"HeadMoments.{name}: missing, expected float64 {list(shape_of(name, sizes))}")
        refuse_impossible(self, sizes)

    @property
    def entering(self) -> tuple[Tensor, Tensor]:
        return self.z_mean_C, self.z_covariance_CC

    @property
    def system_width(self) -> int | None:
        if self.system_HTT is None:
            return None
        return self.energy_HD.shape[1] if self.kept_HK is None else self.kept_HK.shape[1]

    @property
    def q_second_HDD(self) -> Tensor:
        return self.qq_HDD / self.tokens

    @property
    def k_second_HDD(self) -> Tensor:
        return self.kk_HDD / self.tokens

    @property
    def k_centred_HDD(self) -> Tensor:
        """Second moment of k centred within each image: softmax ignores a constant added to a query's row."""
        return self.kk_centred_HDD / self.tokens

    @property
    def z_mean_C(self) -> Tensor:
        return self.z_sum_C / self.tokens

    @property
    def z_second_CC(self) -> Tensor:
        return self.zz_CC / self.tokens

    @property
    def z_covariance_CC(self) -> Tensor:
        return self.z_second_CC.addr_(self.z_mean_C, self.z_mean_C, alpha=-1)


SiteMoments = ChannelMoments | HeadMoments | PatchMoments
OneKind = TypeVar("OneKind", bound=SiteMoments)


def moments_on_device(moments: OneKind, device: torch.device | str) -> OneKind:
    values = ((each.name, getattr(moments, each.name)) for each in fields(moments))
    tensors: dict[str, Any] = {name: value.to(device) for name, value in values if isinstance(value, Tensor)}
    return replace(moments, **tensors)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moments:
    """A calibration's result: statistics by site, their lineage, and the calibrated images.

    Merging needs the same `model`, `preprocessing` and `dtype` in `lineage`. `fingerprints` are sorted by content hash,
    and empty when unknown. `group_ids` [images] are the images' groups in that order, `half` the moments of about half
    of the groups. `metrics` [O,O], by name of a weight, weigh changes of its layer's outputs by their effect on the
    model's outputs; files never hold them.
    """

    sites: Mapping[str, SiteMoments]
    lineage: Mapping[str, str]
    images: int
    fingerprints: Fingerprints = field(default_factory=Fingerprints)
    group_ids: Tensor = field(default_factory=no_ids)
    half: "Moments | None" = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.images < 1:
            raise BadInput(f"Moments.images: got {self.images}, expected at least 1")
        if not self.sites:
            raise BadInput("Moments.sites: got none, expected at least one site")
        if len(self.image_ids) not in (0, self.images):
            raise BadInput(f"Moments.image_ids: got {len(self.image_ids)} for {self.images} images")
        if len(hashes := self.fingerprints.hashes_M2) not in (0, len(self.image_ids)):
            raise BadInput(f"Moments.image_hashes: got {len(hashes)} for {self.images} images")
        if self.half is not None or len(self.group_ids):
            self._refuse_groups()
        if self.half is not None:
            self._refuse_half(self.half)

    @property
    def image_ids(self) -> Tensor:
        return self.fingerprints.ids

    def _refuse_groups(self) -> None:
        if len(self.group_ids) != self.images or len(self.image_ids) != self.images:
            raise BadInput(f"Moments.group_ids: got {len(self.group_ids)} for {self.images} images with groups")

    def _refuse_half(self, half: "Moments") -> None:
        inside = torch.isin(self.image_ids, half.image_ids)
        if set(half.sites) != set(self.sites) or int(inside.sum()) != half.images or half.images >= self.images:
            raise BadInput("Moments.half: expected the same sites over some of the same images")
        if bool(torch.isin(self.group_ids[inside], self.group_ids[~inside]).any()):
            raise BadInput("Moments.half: a group is in both halves")
