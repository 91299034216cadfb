"""Blocks of a hierarchy as rows of parts over tokens, whatever layout the model around them has.

Legend: B inputs, N tokens, row by row of a map, C channels.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from corp_deploy.traced.programs.twins import without_memory

from .depthwise import DepthwiseMlp
from .maps import Grid, OnMap, map_from_tokens, tokens_from_map
from .steps import Branch, Passage, Step

Layout = Literal["tokens", "rows", "maps"]
"""[B,N,C], [B,H,W,C] or [B,C,H,W]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """x -> shortcut(x) + scale * layer(norm(x)) by the names of a block's modules, x itself without a shortcut; what
    the layer gives of x where it stands `alone`.
    """

    layer: str
    norm: str = ""
    scale: str = ""
    shortcut: str = ""
    alone: bool = False

    def __post_init__(self) -> None:
        assert not self.alone or not (self.norm or self.scale or self.shortcut), self


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A place in a block that stays as it is: its name there, the kind of site lost, and why."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The layout in which a block takes and gives its stream, the grids of the maps that enter and leave, (0, 0) where
    they are none, and how many tokens enter and are left.
    """

    layout: Layout
    before: Grid = (0, 0)
    behind: Grid = (0, 0)
    tokens: int = 0
    left: int = 0


class TokenBlock(nn.Module):
    """A block of a library's, its parts one behind the other over tokens; modules keep the library's names.

    `library`: what it was made of, without memory, by which weights under the library's names are read.
    """

    def __init__(
        self,
        library: nn.Module,
        modules: Mapping[str, nn.Module],
        parts: tuple[Part, ...],
        place: Place,
        kept: tuple[Kept, ...] = (),
    ) -> None:
        super().__init__()
        for name, module in modules.items():
            *above, last = name.split(".")
            within: nn.Module = self
            for each in above:
                if each not in dict(within.named_children()):
                    within.add_module(each, nn.Module())
                within = within.get_submodule(each)
            within.add_module(last, module)
        self.parts, self.place, self.kept = parts, place, kept
        self._library = (without_memory(library),)  # in a tuple, so that it is no module of this one

    @property
    def library(self) -> nn.Module:
        return self._library[0]

    def _step(self, name: str, part: Part, read: Tensor | None) -> Step:
        layer = self.get_submodule(part.layer)
        if part.alone:
            return Passage(module=layer, name=f"{name}.{part.layer}")
        return Branch(
            name=f"{name}.{part.layer}",
            norm=self.get_submodule(part.norm) if part.norm else nn.Identity(),
            layer=layer,
            scale_C=self.get_parameter(part.scale).detach() if part.scale else None,
            shortcut=self.get_submodule(part.shortcut) if part.shortcut else None,
            read=None if isinstance(layer, DepthwiseMlp) else read,  # whose tokens need their neighbours
        )

    def steps(self, name: str, read: Tensor | None = None) -> Iterator[Step]:
        """The parts in the order they run; `name` is the block's, `read` are the tokens behind it that count."""
        for part in self.parts:
            yield self._step(name, part, read if part is self.parts[-1] else None)

    def forward(self, x: Tensor) -> Tensor:
        x_BNC = self._tokens(x)
        for step in self.steps(""):
            assert isinstance(step, Branch | Passage), step
            x_BNC = step(x_BNC)
        return self._laid_out(x_BNC)

    def _tokens(self, x: Tensor) -> Tensor:
        if self.place.layout == "tokens":
            return x
        rows = x.shape[1:3] if self.place.layout == "rows" else x.shape[2:]
        assert rows == self.place.before, (x.shape, self.place)
        return x.flatten(1, 2) if self.place.layout == "rows" else tokens_from_map(x)

    def _laid_out(self, x_BNC: Tensor) -> Tensor:
        if self.place.layout == "tokens":
            return x_BNC
        if self.place.layout == "maps":
            return map_from_tokens(x_BNC, self.place.behind)
        x_BHWC: Tensor = x_BNC.unflatten(1, self.place.behind)
        return x_BHWC


Conversion = tuple[Layout, Callable[[nn.Module, Place], TokenBlock]]
"""The layout of a kind of a library's blocks, and what makes one of ours of such a one."""


def whole(module: nn.Module, place: Place, kept: tuple[Kept, ...] = ()) -> TokenBlock:
    """A module of maps run as it is."""
    assert place.layout == "maps", place
    return TokenBlock(module, {"maps": OnMap(module, place.before)}, (Part(layer="maps", alone=True),), place, kept)


def token_blocks(model: nn.Module) -> list[tuple[str, TokenBlock]]:
    """Those of a model with their names, in the order they run."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, TokenBlock)]
