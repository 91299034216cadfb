"""timm's convolutional networks made of rows of convolutions: the same function of images of one size."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from timm.models.resnet import ResNet
from torch import Tensor, nn

from ground.errors import BadInput

from . import timm_resnet_blocks
from .conv_block import ConvBlock
from .maps import Grid
from .modules import replaced
from .timm_folding import Maps, Parts, Unknown, maps_of
from .token_blocks import without_memory

ConvNet = ResNet
State = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How timm's models of a class are laid out, by the names of their modules in the order they run, and how their
    parts become ours; a block of `stages` that `block` doesn't know stays as it is.
    """

    stem: tuple[str, ...]
    stages: tuple[str, ...]
    tail: tuple[str, ...]
    block: Callable[[str, nn.Module, Maps], ConvBlock]
    new_stem: Callable[[nn.Module, Maps], Parts]
    new_tail: Callable[[nn.Module, Maps], Parts]


PLANS: Mapping[type[nn.Module], Plan] = MappingProxyType(
    {
        ResNet: Plan(
            stem=timm_resnet_blocks.STEM,
            stages=timm_resnet_blocks.STAGES,
            tail=timm_resnet_blocks.TAIL,
            block=timm_resnet_blocks.converted,
            new_stem=timm_resnet_blocks.stem,
            new_tail=timm_resnet_blocks.tail,
        ),
    }
)


def plan_of(model: nn.Module) -> Plan:
    """Of the model's class; one with named outputs is of a class of its own below that."""
    return next(plan for kind, plan in PLANS.items() if isinstance(model, kind))


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All blocks, ours and timm's, with their names in the order they run."""
    blocks: list[tuple[str, nn.Module]] = []
    for stage in plan_of(model).stages:
        blocks += _in_stage(stage, model.get_submodule(stage))
    return blocks


def _in_stage(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children of sequences within sequences."""
    rows: list[tuple[str, nn.Module]] = []
    for child, each in module.named_children():
        path = f"{name}.{child}"
        rows += _in_stage(path, each) if type(each) is nn.Sequential else [(path, each)]
    return rows


def _converted(model: nn.Module, size: Grid) -> nn.Module:
    plan = plan_of(model)
    maps = maps_of(model, int(model.in_chans), size)  # type: ignore[arg-type]
    modules: Parts = {}
    for make in (plan.new_stem, plan.new_tail):
        modules |= make(model, maps)
    for name, block in blocks_of(model):
        try:
            modules[name] = plan.block(name, block, maps)
        except Unknown:
            continue  # it stays, and says so as it is asked for its site
    return replaced(model, modules)


def why_kept(name: str, block: nn.Module, model: nn.Module) -> str:
    """Why a block of timm's stays as it is."""
    try:
        plan_of(model).block(name, block, Maps(before={}, behind={}))
    except Unknown as error:
        return str(error)
    except KeyError:
        return "its library built it; a model that corp-deploy builds has another one of the same function"
    raise AssertionError(name)


def library_form(model: nn.Module) -> nn.Module | None:
    """timm's own model, without memory, that a model was made of; None for timm's own."""
    forms: dict[str, tuple[nn.Module]] = {key: value for key, value in vars(model).items() if key == "_library_form"}
    return forms["_library_form"][0] if forms else None


def with_conv_blocks(model: nn.Module, size: Grid) -> nn.Module:
    """The model, in eval mode, with its blocks as rows of convolutions for images of this size; itself where it is no
    such network, or its norms can't be folded. Raises BadInput for a size that it doesn't take.
    """
    if not isinstance(model, ConvNet):
        return model
    try:
        own = _converted(model, size)
    except Unknown:
        return model
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0][:150]
        raise BadInput(f"{type(model).__name__} doesn't take images of {size[0]}x{size[1]} ({reason})") from None
    vars(own)["_library_form"] = (without_memory(model),)  # in a tuple, so that it is no module of this one
    vars(own)["_library_size"] = size
    return own


def _shapes(state: State) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in state.items() if not name.endswith("num_batches_tracked")}


def own_state(model: nn.Module, state: State) -> dict[str, Tensor]:
    """Weights under timm's names as those of a model of rows of convolutions; where they don't fit they keep timm's
    names.
    """
    form = library_form(model)
    if form is None or _shapes(form.state_dict()) != _shapes(state):
        return dict(state)
    theirs = replaced(form, {}).to_empty(device=next(iter(state.values())).device)
    theirs.load_state_dict(dict(state), strict=False, assign=True)
    size: Grid = vars(model)["_library_size"]
    return _converted(theirs.eval(), size).state_dict()
