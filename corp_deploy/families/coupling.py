"""Which channels of a convolutional network are coupled: a walk through its modules in the order they run."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import nn

from .conv_block import ConvBlock
from .convolution import Convolution
from .coupled_site import Along, CoupledSite, Reader
from .squeeze import SqueezeExcite

Named = tuple[str, nn.Module]


@dataclass(slots=True)
class _Stream:
    """Channels on their way; two that are added up are one, under `joined`."""

    writers: dict[str, Convolution] = field(default_factory=dict)
    along: dict[str, Along] = field(default_factory=dict)
    readers: dict[str, Reader] = field(default_factory=dict)
    reason: str = ""
    joined: "_Stream | None" = None

    @property
    def whole(self) -> "_Stream":
        return self if self.joined is None else self.joined.whole

    def join(self, other: "_Stream") -> "_Stream":
        """Both are one from here on."""
        one, two = self.whole, other.whole
        if one is two:
            return one
        one.writers |= two.writers
        one.along |= two.along
        one.readers |= two.readers
        one.reason = one.reason or two.reason
        two.joined = one
        return one


class _Walk:
    """Follows the channels; `streams` has those found, in order."""

    def __init__(self) -> None:
        self.streams: list[_Stream] = []

    def _new(self, path: str, writer: Convolution) -> _Stream:
        stream = _Stream(writers={path: writer}, reason=_grouped(writer))
        self.streams.append(stream)
        return stream

    def through(self, path: str, module: nn.Module, at: _Stream) -> _Stream:
        """The stream behind a module that `at` enters."""
        at = at.whole
        if isinstance(module, ConvBlock):
            return self._block(path, module, at)
        if isinstance(module, nn.Sequential):
            for name, child in module.named_children():
                at = self.through(f"{path}.{name}", child, at)
            return at
        if isinstance(module, SqueezeExcite) or (isinstance(module, Convolution) and module.is_depthwise):
            at.along[path] = module
            return at
        if isinstance(module, Convolution):
            at.readers[path] = module
            at.reason = at.reason or _grouped(module)
            return self._new(path, module)
        if isinstance(module, nn.Linear):
            return self._head(path, module, at)
        if module.state_dict():
            at.reason = at.reason or f"{path} is {type(module).__name__}, of which no reader can be made"
            return self._unknown(at.reason)
        return at

    def _head(self, path: str, module: nn.Linear, at: _Stream) -> _Stream:
        at.readers[path] = module
        if at.writers and next(iter(at.writers.values())).out_channels != module.in_features:
            at.reason = at.reason or f"{path} reads {module.in_features} features of its channels"
        return _Stream()

    def _unknown(self, reason: str) -> _Stream:
        """What a module that isn't known gives."""
        return _Stream(reason=f"it goes on from where {reason}")

    def _block(self, path: str, block: ConvBlock, at: _Stream) -> _Stream:
        inside = _inside(block)
        behind = at
        for name, part in block.row.items():
            if name not in inside:
                behind = self._part(f"{path}.{name}", part, behind, block)
        if not block.adds:
            return behind
        beside = self.through(f"{path}.{block.shortcut_name}", block.shortcut, at)
        return beside.join(behind)

    def _part(self, path: str, part: nn.Module, at: _Stream, block: ConvBlock) -> _Stream:
        """A row's first convolution reads, its last one writes."""
        convolutions = _dense(block)
        if isinstance(part, Convolution) and not part.is_depthwise and len(convolutions) > 1:
            at = at.whole
            if part is convolutions[0]:
                at.readers[path] = part
                at.reason = at.reason or _grouped(part)
                return at
            return self._new(path, part)
        return self.through(path, part, at)


def _grouped(conv: Convolution) -> str:
    return "a convolution in groups reads or writes it" if conv.groups > 1 else ""


def _dense(block: ConvBlock) -> list[Convolution]:
    """A row's convolutions that mix channels."""
    return [each for each in block.convolutions.values() if not each.is_depthwise]


def _inside(block: ConvBlock) -> set[str]:
    """What of a row stands between its first and its last convolution that mixes channels."""
    dense = _dense(block)
    places = [place for place, part in enumerate(block.row.values()) if any(part is each for each in dense)]
    return set(list(block.row)[places[0] + 1 : places[-1]])


def couplings(modules: Iterable[Named]) -> Iterator[tuple[str, CoupledSite | str]]:
    """Every stream by the path of its first writer, or why its channels can't be removed. The modules run one behind
    the other, the first on images; what is behind the last is given.
    """
    walk, at = _Walk(), _Stream(reason="it is the images")
    for path, module in modules:
        at = walk.through(path, module, at).whole
    if at.writers:
        at.reason = at.reason or "it is what the model gives"
    for stream in walk.streams:
        if stream.joined is not None:
            continue
        name = next(iter(stream.writers))
        if stream.reason or not stream.readers:
            yield name, stream.reason or "nothing reads it"
        else:
            yield (
                name,
                CoupledSite(name=name, writers=stream.writers, along=stream.along, readers=stream.readers),
            )
