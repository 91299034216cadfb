"""timm's hierarchies made of blocks of tokens: the same weights, and the same function of images of one size."""

import copy
import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from timm.layers import RelPosMlp
from timm.models.efficientformer import EfficientFormer
from timm.models.efficientformer_v2 import EfficientFormerV2
from timm.models.hiera import Hiera
from timm.models.maxxvit import MaxxVit
from timm.models.tiny_vit import TinyVit
from torch import Tensor, nn

from corp_deploy.traced.programs.twins import without_memory
from ground.errors import BadInput

from . import timm_efficientformer_blocks, timm_hiera_blocks, timm_maxxvit_blocks, timm_tiny_vit_blocks
from .modules import replaced
from .token_blocks import Conversion, Layout, Place, TokenBlock, token_blocks

Hierarchy = EfficientFormer | EfficientFormerV2 | Hiera | MaxxVit | TinyVit
State = Mapping[str, Tensor]
_CONVERSIONS: Mapping[type[nn.Module], Conversion] = MappingProxyType(
    {
        **timm_efficientformer_blocks.CONVERSIONS,
        **timm_hiera_blocks.CONVERSIONS,
        **timm_maxxvit_blocks.CONVERSIONS,
        **timm_tiny_vit_blocks.CONVERSIONS,
    }
)


_TABLE = "attention_bias_idxs"
"""A buffer that some of timm's checkpoints have, made of sizes."""


def timm_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """timm's own blocks with their names, in the order they run, none that stands in another or in one of ours."""
    outermost: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        is_block = isinstance(module, TokenBlock) or type(module) in _CONVERSIONS
        if is_block and not (outermost and name.startswith(f"{outermost[-1][0]}.")):
            outermost.append((name, module))
    return [(name, block) for name, block in outermost if not isinstance(block, TokenBlock)]


def _grid(layout: Layout, shape: torch.Size) -> tuple[int, int]:
    if layout == "tokens":
        return (0, 0)
    height, width = shape[1:3] if layout == "rows" else shape[2:]
    return height, width


def _tokens(layout: Layout, shape: torch.Size) -> int:
    return shape[1] if layout == "tokens" else math.prod(_grid(layout, shape))


def _places(model: nn.Module, size: tuple[int, int]) -> dict[str, Place]:
    """Where each block stands at images of this size; the model is run once without memory."""
    empty = without_memory(model).eval()
    places: dict[str, Place] = {}

    def hook(name: str, layout: Layout) -> None:
        def hear(_: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
            before = inputs[0].shape
            places[name] = Place(
                layout=layout,
                before=_grid(layout, before),
                behind=_grid(layout, out.shape),
                tokens=_tokens(layout, before),
                left=_tokens(layout, out.shape),
            )

        empty.get_submodule(name).register_forward_hook(hear)

    for name, block in timm_blocks(empty):
        hook(name, _CONVERSIONS[type(block)][0])
    with torch.inference_mode(False), torch.no_grad():
        empty(torch.empty(1, int(model.in_chans), *size, device="meta"))  # type: ignore[arg-type]
    return places


def with_token_blocks(model: nn.Module, size: tuple[int, int]) -> nn.Module:
    """The model, in eval mode, with its blocks as blocks of tokens, for images of this size; itself where it is no
    hierarchy. Raises BadInput for a size that it doesn't take.
    """
    if not isinstance(model, Hierarchy):
        return model
    try:
        places = _places(model, size)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).partition("\n")[0][:150]
        raise BadInput(
            f"{type(model).__name__} doesn't take images of {size[0]}x{size[1]} ({reason}); give another img_size, one "
            "that its windows divide"
        ) from None
    blocks = dict[str, nn.Module]()
    for name, block in timm_blocks(model):
        blocks[name] = _CONVERSIONS[type(block)][1](block, places[name])
    return replaced(model, blocks)


def library_form(model: nn.Module) -> nn.Module:
    """timm's own model of the same architecture, without memory."""
    empty = without_memory(model)
    return replaced(empty, {name: block.library for name, block in token_blocks(empty)})


def _shapes(state: State) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in state.items() if not name.endswith(_TABLE)}


def _block_state(block: TokenBlock, state: State) -> State | None:
    """Of one block, from its weights under timm's names; None where names or shapes are others."""
    if _shapes(block.library.state_dict()) != _shapes(state):
        return None
    theirs = copy.deepcopy(block.library).to_empty(device=next(iter(state.values())).device)
    theirs.load_state_dict(dict(state), strict=False, assign=True)
    for module in theirs.modules():
        if isinstance(module, RelPosMlp):
            module.init_non_persistent_buffers()  # what its network is run on
    return _CONVERSIONS[type(theirs)][1](theirs, block.place).state_dict()


def own_state(model: nn.Module, state: State) -> dict[str, Tensor]:
    """Weights under timm's names as those of a model with blocks of tokens; a block that they don't fit keeps timm's
    names.
    """
    ours = dict(state)
    for name, block in token_blocks(model):
        inside = {key.removeprefix(f"{name}."): each for key, each in state.items() if key.startswith(f"{name}.")}
        converted = _block_state(block, inside)
        if converted is not None:
            ours = {key: each for key, each in ours.items() if not key.startswith(f"{name}.")}
            ours |= {f"{name}.{key}": each for key, each in converted.items()}
    return ours
