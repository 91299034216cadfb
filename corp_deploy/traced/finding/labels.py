"""Integer labels of a tensor's elements: those with one label are removed together, those with FIXED never.

A label tensor is tidy if it has stride 0 along every axis that its labels don't vary along, so that the labels of a
feature map take no more memory than those of its channels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

FIXED = -1


def tidy(labels: Tensor) -> Tensor | None:
    """Return the labels with stride 0 along axes that they don't vary along; None if every element is fixed."""
    small = compact(labels)
    for dim in [dim for dim, size in enumerate(labels.shape) if size > 1]:
        if small.shape[dim] > 1:
            first = small.narrow(dim, 0, 1)
            # For most varying axes the second place differs already.
            small = first if torch.equal(first, small.narrow(dim, 1, 1)) and bool((small == first).all()) else small
    return small.expand(labels.shape) if bool((small >= 0).any()) else None


def varying(labels: Tensor) -> tuple[int, ...]:
    """Return the axes that tidy labels vary along."""
    return tuple(dim for dim in range(labels.dim()) if labels.shape[dim] > 1 and labels.stride(dim) != 0)


def compact(*tensors: Tensor) -> Tensor:
    """Return the first of several tensors of one shape with size 1 along the axes that none of them varies along."""
    first, *_ = tensors
    for dim in range(first.dim()):
        if first.shape[dim] > 1 and all(each.stride(dim) == 0 for each in tensors):
            first = first.narrow(dim, 0, 1)
    return first


def meeting_pairs(one: Tensor, other: Tensor) -> Tensor:
    """Return the pairs [P, 2] of different labels at the same places of broadcast tensors, each once."""
    one, other = torch.broadcast_tensors(one, other)
    small, beside = compact(one, other), compact(other, one)
    differ = small != beside
    # Neighbours are mostly alike, so that few keys are left to sort.
    key = torch.unique_consecutive((small[differ].long() << 32) + beside[differ] - FIXED).unique()
    return torch.stack((key >> 32, (key & 0xFFFFFFFF) + FIXED), 1)


def first_along(labels: Tensor, axes: Sequence[int]) -> Tensor:
    """Return the labels [the sizes of axes, in their order] at index 0 of all other axes."""
    for dim in reversed(range(labels.dim())):
        labels = labels if dim in axes else labels.select(dim, 0)
    kept = sorted(axes)
    return labels.permute([kept.index(dim) for dim in axes])


def place_along(labels: Tensor, axes: Sequence[int], rank: int) -> Tensor:
    """Reshape labels [the sizes of axes] to a tensor of `rank` axes, with size 1 along the others."""
    sizes = dict(zip(axes, labels.shape, strict=True))
    order = sorted(range(len(axes)), key=lambda place: axes[place])
    return labels.permute(order).reshape([sizes.get(dim, 1) for dim in range(rank)])


@dataclass(frozen=True, slots=True)
class LabelTensor:
    """The tidy labels of a program's tensor at a batch of 1; None if no element can be removed, `why` says the reason.

    `constant`: the name of a parameter or constant, whose elements are removed with those that they meet.
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
        """The flag that no element of the tensor can be removed."""
        return self.labels is None and not self.constant


def label_tensor(labels: Tensor, why: str = "") -> LabelTensor:
    """Build a LabelTensor of labels that may be untidy."""
    return LabelTensor(tuple(labels.shape), tidy(labels), why)


class Groups:
    """A union-find of labels, in which a group is named by its least label.

    `reasons`: texts that say why groups stay, by number; a removable group has number 0.
    """

    def __init__(self) -> None:
        self.count = 0
        self.reasons = [""]
        # The last entry of either belongs to FIXED.
        self._parent, self._reason = torch.tensor([FIXED]), torch.tensor([0])

    def add(self, count: int) -> Tensor:
        """Add labels [count], each a group of its own."""
        start, self.count = self.count, self.count + count
        if self.count >= len(self._parent):
            parent, reason = torch.arange(2 * self.count + 1), torch.zeros(2 * self.count + 1, dtype=torch.long)
            parent[:start], reason[:start], parent[-1] = self._parent[:start], self._reason[:start], FIXED
            self._parent, self._reason = parent, reason
        return torch.arange(start, self.count, dtype=torch.long)

    def of(self, labels: Tensor) -> Tensor:
        """Return the names of the labels' groups, FIXED for FIXED."""
        group = labels.long()
        while not torch.equal(upper := self._parent[group], group):
            group = upper
        return group

    def reason_of(self, labels: Tensor) -> Tensor:
        """Return the numbers of the reasons for which the labels' groups stay."""
        return self._reason[self.of(labels)]

    def join(self, met: Tensor) -> None:
        """Join the two labels of each pair [P, 2]."""
        ends, reason = met, self.reason_of(met).amax(1) if len(met) else met
        while len(ends):
            ends = self.of(ends)
            ends = ends[ends[:, 0] != ends[:, 1]]
            self._parent.scatter_reduce_(0, ends.amax(1), ends.amin(1), "amin")
        if len(met):
            self._reason.scatter_reduce_(0, self.of(met[:, 0]), reason, "amax")

    def stay(self, labels: Tensor, why: str) -> None:
        """Let the labels' groups stay, each for the first reason that it gets."""
        groups = self.of(labels)
        if len(groups := groups[self._reason[groups] == 0]):
            if self.reasons[-1] != why:
                self.reasons.append(why)
            self._reason[groups] = len(self.reasons) - 1


class Uneven(Exception):
    """The error that a tensor's remaining elements form no tensor: none is left, or rows differ in length."""


def keep_mask(labels: Tensor, gone: Tensor) -> Tensor:
    """Return the mask of elements that stay, fixed ones always; `gone` [labels] is the mask of removed labels."""
    return (labels == FIXED) | ~gone[labels.clamp(min=0)]


def kept_sizes(keep: Tensor) -> tuple[int, ...]:
    """Return the shape of the tensor that a mask's kept elements form; raise Uneven if they form none."""
    total, dims = int(keep.sum()), range(keep.dim())
    if total == 0:
        raise Uneven(f"0 of {tuple(keep.shape)}")
    if total == keep.numel():
        return tuple(keep.shape)
    # The maximum of bytes takes a tenth of the time of `any`.
    others = [[other for other in dims if other != dim] for dim in dims]
    lines = [keep.view(torch.uint8).amax(among) if among else keep for among in others]
    by_axis = tuple(int(line.sum()) for line in lines)
    if math.prod(by_axis) == total:
        return by_axis
    for dim in (dim for dim in reversed(range(keep.dim())) if keep.shape[dim] > 1):
        counts = torch.unique(keep.sum(dim))
        sizes = (*by_axis[:dim], int(counts[-1]), *by_axis[dim + 1 :])
        if len(counts[counts > 0]) == 1 and math.prod(sizes) == total:
            return sizes
    raise Uneven(f"{total} of {tuple(keep.shape)}")


def remove_labels(labels: Tensor, gone: Tensor) -> Tensor:
    """Return tidy labels without the removed ones, still tidy; raise Uneven if no tensor is left."""
    small = compact(labels)
    keep = keep_mask(small, gone)
    if small.numel() and bool(keep.all()):
        return labels
    sizes = kept_sizes(keep)
    full_sizes = [size if of == 1 else have for size, of, have in zip(labels.shape, small.shape, sizes, strict=True)]
    return small[keep].reshape(sizes).expand(full_sizes)


def narrow_value(value: Any, gone: Tensor) -> Any:
    """Return a node's value without removed elements; raise Uneven if no tensor is left."""
    if isinstance(value, tuple):
        return tuple(narrow_value(each, gone) for each in value)
    if not isinstance(value, LabelTensor) or value.labels is None:
        return value
    labels = remove_labels(value.labels, gone)
    return LabelTensor(tuple(labels.shape), labels, value.why)


def loses_elements(value: Any, gone: Tensor) -> bool:
    """Check whether elements of a node's value are removed."""
    every = [each.labels for each in tree_leaves(value) if isinstance(each, LabelTensor)]
    return not all(bool(keep_mask(compact(labels), gone).all()) for labels in every if labels is not None)


def select_kept(tensor: Tensor, keep: Tensor) -> Tensor:
    """Return what a mask keeps of a tensor; axes of size 1 are expanded to the mask's first."""
    tensor = tensor.expand(torch.broadcast_shapes(tensor.shape, keep.shape))
    axes = tuple(dim for dim in range(keep.dim()) if keep.shape[dim] > 1)
    front, sizes = tuple(range(len(axes))), kept_sizes(keep)
    if tensor.is_meta:
        return tensor.new_empty([sizes[dim] if dim in axes else size for dim, size in enumerate(tensor.shape)])
    rows = tensor.movedim(axes, front).flatten(0, len(axes) - 1)
    chosen = rows.index_select(0, torch.nonzero(keep.reshape(-1))[:, 0].to(tensor.device))
    shaped: Tensor = chosen.unflatten(0, [sizes[dim] for dim in axes])
    return shaped.movedim(front, axes).contiguous()
