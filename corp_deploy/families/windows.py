"""Attention within windows of a map: which tokens stand in which window, and what keeps them apart in shifted ones.

An input's windows are an axis behind the batch, never a part of it: whatever is counted by input stays so.

Legend: B inputs, N tokens, row by row of a map, W windows of an input, n slots of one, S = W * n, V parts of windows, C
channels, H heads, D dimensions of one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .maps import Grid

APART = -100.0
"""What timm and torchvision add to scores of tokens that a shift has brought together from opposite sides."""


_HERE = torch.device("cpu")  # no checkpoint has the tables, so that a model built without memory needs them too


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """A map, the size of its windows, and by how many rows and columns it is rolled up and left before it is cut.

    `spread`: the tokens of a window are as far from each other as a map of one token a window is large, so that each
    window is a grid over the whole map (MaxViT's grid attention, arXiv 2204.01697, section 3.2).
    """

    grid: Grid
    window: Grid
    shift: Grid = (0, 0)
    spread: bool = False

    def __post_init__(self) -> None:
        alike = zip(self.grid, self.window, self.shift, strict=True)
        assert all(size > 0 and window > 0 and 0 <= shift < window for size, window, shift in alike), self
        assert not self.spread or (self.padded == self.grid and not any(self.shift)), self

    @property
    def padded(self) -> Grid:
        """The map with as much below and beside it as whole windows take."""
        height, width = (-(-size // window) * window for size, window in zip(self.grid, self.window, strict=True))
        return height, width

    @property
    def count(self) -> int:
        """Windows of a map."""
        return self.padded[0] * self.padded[1] // self.size

    @property
    def size(self) -> int:
        """Slots of a window."""
        return self.window[0] * self.window[1]

    def cut(self, map_HW: Tensor) -> Tensor:
        """A padded map [H,W] as windows [W,n], both row by row."""
        (rows, columns), (height, width) = self.window, self.padded
        if self.spread:
            by_place = map_HW.view(rows, height // rows, columns, width // columns)
            return by_place.permute(1, 3, 0, 2).reshape(self.count, -1)
        return map_HW.view(height // rows, rows, width // columns, columns).transpose(1, 2).reshape(self.count, -1)

    def places(self) -> Tensor:
        """Of each slot [S] the token that stands there, N for padding."""
        tokens = self.grid[0] * self.grid[1]
        rolled = torch.arange(tokens, device=_HERE).view(self.grid).roll((-self.shift[0], -self.shift[1]), (0, 1))
        beyond = (0, self.padded[1] - self.grid[1], 0, self.padded[0] - self.grid[0])
        return self.cut(F.pad(rolled, beyond, value=tokens)).flatten()

    def regions(self) -> Tensor | None:
        """Of each slot [W,n] the region in which its tokens see each other: those that are neighbours by the roll alone
        don't; None where all of a window do.
        """
        if not any(self.shift):
            return None
        rows, columns = (
            _regions(size, window, shift)
            for size, window, shift in zip(self.padded, self.window, self.shift, strict=True)
        )
        return self.cut(3 * rows[:, None] + columns)

    def relative(self) -> Tensor:
        """Which of the (2 rows - 1)(2 columns - 1) places each slot has as seen from each other [n,n]."""
        rows, columns = self.window
        slots = torch.arange(self.size, device=_HERE)
        down, right = slots // columns, slots % columns
        down_nn = down[:, None] - down + rows - 1
        return down_nn * (2 * columns - 1) + right[:, None] - right + columns - 1

    def log_places(self, trained: Grid) -> Tensor:
        """Those places [T,2] on a logarithmic scale on which the ends of a window of the training are 1: -1 to 1 in
        each direction for that window's size (Swin V2, arXiv 2111.09883, equation 4). `trained` (0, 0): this one.
        """
        sizes = zip(self.window, trained if trained[0] else self.window, strict=True)
        sides = [8.0 * torch.arange(1 - size, size, device=_HERE) / max(end - 1, 1) for size, end in sizes]
        places_T2 = torch.cartesian_prod(*sides)
        return places_T2.sign() * (places_T2.abs() + 1.0).log2() / 3.0


def _regions(size: int, window: int, shift: int) -> Tensor:
    """Of each row or column of a rolled map: 2 if from the other side, 1 if in a window with such, else 0."""
    places = torch.arange(size, device=_HERE)
    return torch.zeros_like(places) if not shift else (places >= size - window).long() + (places >= size - shift)


def _parts(region_Wn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What is added to scores [W,n,n]; and of each part of a window whose tokens see each other, the window [V] and
    which of its slots are the part's [V,n].
    """
    mask_Wnn = torch.zeros(1, device=_HERE).where(region_Wn[:, :, None] == region_Wn[:, None, :], APART)
    parts = [(window, region_n == label) for window, region_n in enumerate(region_Wn) for label in region_n.unique()]
    parts_V = torch.tensor([window for window, _ in parts], device=_HERE)
    return mask_Wnn, parts_V, torch.stack([slots_n for _, slots_n in parts]).float()


class Windows(nn.Module):
    """Tokens of a map to the slots of its windows and back; the tables are made from a plan.

    `behind`: of the tokens that leave, where they are fewer than those that enter. `filling_C`: what stands in
    padding, zeros where there is none. `mask_Wnn`, `parts_V` and `slots_Vn`: see _parts; None where all tokens of a
    window see each other.
    """

    behind: "Windows | None"
    filling_C: Tensor | None

    def __init__(self, plan: WindowPlan, *, behind: "Windows | None" = None, filling_C: Tensor | None = None) -> None:
        super().__init__()
        self.plan, self.behind = plan, behind
        self.register_buffer("filling_C", None if filling_C is None else filling_C.detach().clone())
        places_S, region_Wn = plan.places(), plan.regions()
        self.tokens = plan.grid[0] * plan.grid[1]
        self.pads = len(places_S) > self.tokens
        self.moves = not places_S.equal(torch.arange(self.tokens, device=_HERE))
        self.register_buffer("places_S", places_S, persistent=False)
        self.register_buffer("back_N", places_S.argsort(stable=True)[: self.tokens], persistent=False)
        mask_Wnn, parts_V, slots_Vn = (None, None, None) if region_Wn is None else _parts(region_Wn)
        self.register_buffer("mask_Wnn", mask_Wnn, persistent=False)
        self.register_buffer("parts_V", parts_V, persistent=False)
        self.register_buffer("slots_Vn", slots_Vn, persistent=False)

    places_S: Tensor
    back_N: Tensor
    mask_Wnn: Tensor | None
    parts_V: Tensor | None
    slots_Vn: Tensor | None

    @property
    def count(self) -> int:
        """Of an input."""
        return self.plan.count

    @property
    def size(self) -> int:
        """Slots of one."""
        return self.plan.size

    @property
    def leaving(self) -> "Windows":
        """Of the tokens that leave."""
        return self if self.behind is None else self.behind

    def forward(self, x_BNC: Tensor) -> Tensor:
        """[B,N,C] -> [B,S,C], with what stands in padding."""
        if self.filling_C is None or not self.pads:
            return self.slots(x_BNC)
        padding_B1C = self.filling_C.expand(x_BNC.shape[0], 1, -1)
        return torch.cat((x_BNC, padding_B1C), dim=1).index_select(1, self.places_S)

    def slots(self, x_BNC: Tensor) -> Tensor:
        """[B,N,C] -> [B,S,C], zeros where there is padding."""
        assert x_BNC.ndim == 3, x_BNC.shape
        assert x_BNC.shape[1] == self.tokens, (x_BNC.shape, self.plan)
        if self.moves:
            return (F.pad(x_BNC, (0, 0, 0, 1)) if self.pads else x_BNC).index_select(1, self.places_S)
        return x_BNC

    def apart(self, x_BSC: Tensor) -> Tensor:
        """[B,S,C] -> [B,W,n,C]."""
        x_BWnC: Tensor = x_BSC.unflatten(1, (self.count, self.size))
        return x_BWnC

    def joined(self, x_BWnC: Tensor) -> Tensor:
        """[B,W,n,C] -> [B,N,C] of the tokens that leave; what stands in padding is left out."""
        if self.behind is not None:
            return self.behind.joined(x_BWnC)
        assert x_BWnC.shape[1:3] == (self.count, self.size), (x_BWnC.shape, self.plan)
        x_BSC = x_BWnC.flatten(1, 2)
        return x_BSC.index_select(1, self.back_N) if self.moves else x_BSC

    def masked(self, scores_BWHnn: Tensor) -> Tensor:
        """Scores with what keeps the tokens of shifted windows apart."""
        return scores_BWHnn if self.mask_Wnn is None else scores_BWHnn + self.mask_Wnn[None, :, None]

    def attended(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        """Values [B,W,H,n,v] by attention at scores with a bias [1,1,H,n,n] and the mask. torch's kernels take four
        axes, so windows are more heads to them.
        """
        shape = q.shape[1:3]
        added = self.masked(q.new_zeros(1, 1, 1, 1, 1) if bias is None else bias)
        every = added.expand(-1, *shape, q.shape[-2], self.size).flatten(1, 2)
        q, k, v = (each.flatten(1, 2) for each in (q, k, v))
        z_BWHnv: Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=every, scale=scale).unflatten(1, shape)
        return z_BWHnv

    def in_parts(self, x_BWHnD: Tensor) -> Tensor:
        """The same for each part of a window [B,V,H,n,D], of whose slots those in `slots_Vn` count."""
        return x_BWHnD if self.parts_V is None else x_BWHnD.index_select(1, self.parts_V)

    def of_tokens(self, x_BWHnD: Tensor) -> Tensor:
        """The same with zeros for the rows of padding."""
        is_token_W1n1 = (self.places_S < self.tokens).view(self.count, 1, self.size, 1)
        return x_BWHnD * is_token_W1n1 if self.pads else x_BWHnD

    def words(self) -> str:
        rows, columns = self.plan.window
        kind = "grid" if self.plan.spread else "window"
        return f"{self.count} {kind}{'s' * (self.count > 1)} of {rows}x{columns}"
