"""Blocks of convolutions: a row of them beside a shortcut, whatever library's block they were.

Legend: B images, N = H * W tokens, row by row of a map, C channels.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from .convolution import Convolution
from .maps import Grid, map_from_tokens, tokens_from_map


class ConvRow(nn.Module):
    """Parts of maps, one behind the other by their names, for tokens [B,N,C] of a map of this grid."""

    def __init__(self, parts: Mapping[str, nn.Module], grid: Grid) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.grid = grid

    def forward(self, x: Tensor) -> Tensor:
        x = map_from_tokens(x, self.grid)
        for part in self.children():
            x = part(x)
        return tokens_from_map(x)

    def up_to(self, name: str) -> "ConvRow":
        """The same modules, those behind this one left out."""
        parts = dict(self.named_children())
        names = list(parts)
        return ConvRow({each: parts[each] for each in names[: names.index(name) + 1]}, self.grid)

    def ends_with(self, name: str) -> bool:
        """Whether what this part gives is what the row gives."""
        parts = dict(self.named_children())
        behind = list(parts)[list(parts).index(name) + 1 :]
        return all(isinstance(parts[each], nn.Identity) for each in behind)


class ConvBlock(nn.Module):
    """act(shortcut(x) + row(x)) of maps [B,C,H,W]; act(row(x)) where nothing is added. `grid`: of the map that enters.

    Modules keep the library's names: `row` and, where they are not none, `shortcut` and `act` are names.
    """

    def __init__(
        self,
        parts: Mapping[str, nn.Module],
        grid: Grid,
        *,
        adds: bool,
        shortcut: tuple[str, nn.Module] | None = None,
        act: tuple[str, nn.Module] | None = None,
    ) -> None:
        """`adds`: whether what enters, or what the shortcut makes of it, is added."""
        super().__init__()
        assert adds or shortcut is None, shortcut
        for name, part in parts.items():
            self.add_module(name, part)
        for pair in (shortcut, act):
            if pair is not None:
                self.add_module(*pair)
        self.row_names, self.grid, self.adds = tuple(parts), grid, adds
        self.shortcut_name = "" if shortcut is None else shortcut[0]
        self.act_name = "" if act is None else act[0]

    @property
    def row(self) -> dict[str, nn.Module]:
        """The parts in the order they run."""
        return {name: self.get_submodule(name) for name in self.row_names}

    @property
    def shortcut(self) -> nn.Module:
        return self.get_submodule(self.shortcut_name) if self.shortcut_name else nn.Identity()

    @property
    def act(self) -> nn.Module:
        return self.get_submodule(self.act_name) if self.act_name else nn.Identity()

    @property
    def convolutions(self) -> dict[str, Convolution]:
        """All of the row, in the order they run."""
        return {name: part for name, part in self.row.items() if isinstance(part, Convolution)}

    @property
    def beside(self) -> tuple[Convolution, ...]:
        """Those of the shortcut."""
        return tuple(each for each in self.shortcut.modules() if isinstance(each, Convolution))

    @property
    def last(self) -> Convolution:
        """The last one of the row."""
        return list(self.convolutions.values())[-1]

    @property
    def left(self) -> Grid:
        """Of the map that the row gives."""
        return self.last.grid

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for name in self.row_names:
            y = self.get_submodule(name)(y)
        if self.adds:
            y = y + self.shortcut(x)
        out: Tensor = self.act(y)
        return out


def conv_blocks(model: nn.Module) -> list[tuple[str, ConvBlock]]:
    """Those of a model with their names, in the order they run."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, ConvBlock)]
