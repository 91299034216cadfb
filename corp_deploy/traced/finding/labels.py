"""Labels of a tensor's elements: integers, FIXED where an element can't be removed; and what remains of a tensor when
some elements are removed, as a tensor again.

A label tensor is tidy where it has stride 0 along every axis that its labels don't vary along; so the labels of a whole
map of features take no more memory than those of its channels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

FIXED = -1
TYPE = torch.long


def tidy(labels: Tensor) -> Tensor | None:
    """The same labels with stride 0 wherever they don't vary; None where every element is fixed."""
    small = compact(labels)
    for dim in [dim for dim, size in enumerate(labels.shape) if size > 1]:
        if small.shape[dim] > 1:
            first = small.narrow(dim, 0, 1)
            # The second tells of most axes that labels vary along them.
            small = first if torch.equal(first, small.narrow(dim, 1, 1)) and bool((small == first).all()) else small
    return small.expand(labels.shape) if bool((small >= 0).any()) else None


def varying(labels: Tensor) -> tuple[int, ...]:
    """The axes that tidy labels vary along."""
    return tuple(dim for dim in range(labels.dim()) if labels.shape[dim] > 1 and labels.stride(dim) != 0)


def compact(*tensors: Tensor) -> Tensor:
    """One of several tensors of a shape: of size 1 along the axes that none of them varies along."""
    first, *_ = tensors
    for dim in range(first.dim()):
        if first.shape[dim] > 1 and all(each.stride(dim) == 0 for each in tensors):
            first = first.narrow(dim, 0, 1)
    return first


def meeting_pairs(one: Tensor, other: Tensor) -> Tensor:
    """The pairs [P, 2] of labels that meet in tensors that can be broadcast, each once."""
    one, other = torch.broadcast_tensors(one, other)
    small, beside = compact(one, other), compact(other, one)
    differ = small != beside
    # Neighbours are mostly alike, and what is left is little to be sorted.
    key = torch.unique_consecutive((small[differ].long() << 32) + beside[differ] - FIXED).unique()
    return torch.stack((key >> 32, (key & 0xFFFFFFFF) + FIXED), 1)


def first_along(labels: Tensor, axes: Sequence[int]) -> Tensor:
    """Those [the sizes of axes, in their order] that stand first along all other axes."""
    for dim in reversed(range(labels.dim())):
        labels = labels if dim in axes else labels.select(dim, 0)
    kept = sorted(axes)
    return labels.permute([kept.index(dim) for dim in axes])


def place_along(labels: Tensor, axes: Sequence[int], rank: int) -> Tensor:
    """Labels [the sizes of axes] along those of `rank` axes, of size 1 along the others."""
    sizes = dict(zip(axes, labels.shape, strict=True))
    order = sorted(range(len(axes)), key=lambda place: axes[place])
    return labels.permute(order).reshape([sizes.get(dim, 1) for dim in range(rank)])


@dataclass(frozen=True, slots=True)
class LabelTensor:
    """One tensor of a program at a batch of 1: `labels` are of its `shape`, tidy; None where no element can be removed,
    and `why` says what they come from. `constant`: the name of a parameter or constant, whose elements are removed with
    whatever they meet.
    """

    shape: tuple[int, ...]
    labels: Tensor | None = None
    why: str = ""
    constant: str = ""

    @property
    def dims(self) -> tuple[int, ...]:
        """The axes that the labels vary along."""
        return () if self.labels is None else varying(self.labels)

    @property
    def is_fixed(self) -> bool:
        """Whether no element of it can be removed."""
        return self.labels is None and not self.constant


def label_tensor(labels: Tensor, why: str = "") -> LabelTensor:
    """With these labels, untidy as they may be."""
    return LabelTensor(tuple(labels.shape), tidy(labels), why)


class Groups:
    """Labels of which some are one: a forest in which a group is named by its least label. `reasons`: why groups stay,
    by number; a group without one has 0.
    """

    def __init__(self) -> None:
        self.count = 0
        self.reasons = [""]
        # The last one of either is of FIXED.
        self._parent, self._reason = torch.tensor([FIXED]), torch.tensor([0])

    def add(self, count: int) -> Tensor:
        """So many labels [count], each its own group."""
        start, self.count = self.count, self.count + count
        if self.count >= len(self._parent):
            parent, reason = torch.arange(2 * self.count + 1), torch.zeros(2 * self.count + 1, dtype=torch.long)
            parent[:start], reason[:start], parent[-1] = self._parent[:start], self._reason[:start], FIXED
            self._parent, self._reason = parent, reason
        return torch.arange(start, self.count, dtype=TYPE)

    def of(self, labels: Tensor) -> Tensor:
        """The groups of labels by their names, FIXED where there is none."""
        group = labels.long()
        while not torch.equal(upper := self._parent[group], group):
            group = upper
        return group

    def reason_of(self, labels: Tensor) -> Tensor:
        """The numbers of the reasons for which the groups of labels stay."""
        return self._reason[self.of(labels)]

    def join(self, met: Tensor) -> None:
        """The two labels of each pair [P, 2] are one."""
        ends, reason = met, self.reason_of(met).amax(1) if len(met) else met
        while len(ends):
            ends = self.of(ends)
            ends = ends[ends[:, 0] != ends[:, 1]]
            self._parent.scatter_reduce_(0, ends.amax(1), ends.amin(1), "amin")
        if len(met):
            self._reason.scatter_reduce_(0, self.of(met[:, 0]), reason, "amax")

    def stay(self, labels: Tensor, why: str) -> None:
        """The groups of labels stay, for the first reason that is given."""
        groups = self.of(labels)
        if len(groups := groups[self._reason[groups] == 0]):
            if self.reasons[-1] != why:
                self.reasons.append(why)
            self._reason[groups] = len(self.reasons) - 1


class Uneven(Exception):
    """What remains of a tensor is none: its rows have different lengths."""


def keep_mask(labels: Tensor, gone: Tensor) -> Tensor:
    """Which elements stay, fixed ones always; `gone` [labels] says of each label whether it is removed."""
    return (labels == FIXED) | ~gone[labels.clamp(min=0)]


def kept_sizes(keep: Tensor) -> tuple[int, ...]:
    """Return the sizes of what a mask keeps of a tensor. Raises Uneven where that is no tensor."""
    total, dims = int(keep.sum()), range(keep.dim())
    if total == 0:
        raise Uneven(f"0 of {tuple(keep.shape)}")
    if total == keep.numel():
        return tuple(keep.shape)
    # The maximum of bytes takes a tenth of the time of `any`.
    others = [[other for other in dims if other != dim] for dim in dims]
    lines = [keep.view(torch.uint8).amax(among) if among else keep for among in others]
    kept_sizes = tuple(int(line.sum()) for line in lines)
    if math.prod(kept_sizes) == total:
        return kept_sizes
    for dim in (dim for dim in reversed(range(keep.dim())) if keep.shape[dim] > 1):
        counts = torch.unique(keep.sum(dim))
        sizes = (*kept_sizes[:dim], int(counts[-1]), *kept_sizes[dim + 1 :])
        if len(counts[counts > 0]) == 1 and math.prod(sizes) == total:
            return sizes
    raise Uneven(f"{total} of {tuple(keep.shape)}")


def remove_labels(labels: Tensor, gone: Tensor) -> Tensor:
    """Tidy labels without those that are removed, still tidy. Raises Uneven."""
    small = compact(labels)
    keep = keep_mask(small, gone)
    if small.numel() and bool(keep.all()):
        return labels
    sizes = kept_sizes(keep)
    full_sizes = [size if of == 1 else have for size, of, have in zip(labels.shape, small.shape, sizes, strict=True)]
    return small[keep].reshape(sizes).expand(full_sizes)


def narrow_value(value: Any, gone: Tensor) -> Any:
    """What remains of what a node gives, as Marks; numbers as they are. Raises Uneven."""
    if isinstance(value, tuple):
        return tuple(narrow_value(each, gone) for each in value)
    if not isinstance(value, LabelTensor) or value.labels is None:
        return value
    labels = remove_labels(value.labels, gone)
    return LabelTensor(tuple(labels.shape), labels, value.why)


def loses_elements(value: Any, gone: Tensor) -> bool:
    """Whether elements of what a node gives are removed."""
    every = [each.labels for each in tree_leaves(value) if isinstance(each, LabelTensor)]
    return not all(bool(keep_mask(compact(labels), gone).all()) for labels in every if labels is not None)


def select_kept(tensor: Tensor, keep: Tensor) -> Tensor:
    """Return what a mask keeps of a tensor; axes that only the mask has are spread out first."""
    tensor = tensor.expand(torch.broadcast_shapes(tensor.shape, keep.shape))
    axes = tuple(dim for dim in range(keep.dim()) if keep.shape[dim] > 1)
    front, sizes = tuple(range(len(axes))), kept_sizes(keep)
    if tensor.is_meta:
        return tensor.new_empty([sizes[dim] if dim in axes else size for dim, size in enumerate(tensor.shape)])
    rows = tensor.movedim(axes, front).flatten(0, len(axes) - 1)
    chosen = rows.index_select(0, torch.nonzero(keep.reshape(-1))[:, 0].to(tensor.device))
    shaped: Tensor = chosen.unflatten(0, [sizes[dim] for dim in axes])
    return shaped.movedim(front, axes).contiguous()
