"""timm's convolutional networks made of rows of convolutions: the same function of images of one size."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

from timm.models._features import FeatureListNet
from timm.models.efficientnet import EfficientNet
from timm.models.mobilenetv3 import MobileNetV3
from timm.models.regnet import RegNet
from timm.models.resnet import ResNet
from timm.models.resnetv2 import ResNetStage, ResNetV2
from torch import Tensor, nn

from corp_deploy.traced.programs.twins import without_memory
from ground.errors import BadInput

from . import timm_efficientnet_blocks, timm_regnet_blocks, timm_resnet_blocks, timm_resnetv2_blocks
from .conv_block import ConvBlock
from .maps import Grid
from .modules import replaced
from .timm_folding import Maps, Parts, Unknown, maps_of

ConvNet = EfficientNet | MobileNetV3 | RegNet | ResNet
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


_RESNET = Plan(
    stem=timm_resnet_blocks.STEM,
    stages=timm_resnet_blocks.STAGES,
    tail=timm_resnet_blocks.TAIL,
    block=timm_resnet_blocks.converted,
    new_stem=timm_resnet_blocks.stem,
    new_tail=timm_resnet_blocks.tail,
)
_EFFICIENTNET = Plan(
    stem=timm_efficientnet_blocks.STEM,
    stages=timm_efficientnet_blocks.STAGES,
    tail=timm_efficientnet_blocks.TAIL,
    block=timm_efficientnet_blocks.converted,
    new_stem=timm_efficientnet_blocks.stem,
    new_tail=timm_efficientnet_blocks.tail,
)
PLANS: Mapping[type[nn.Module], Plan] = MappingProxyType(
    {
        EfficientNet: _EFFICIENTNET,
        MobileNetV3: replace(_EFFICIENTNET, tail=()),
        FeatureListNet: _RESNET,  # in front of a transformer
        ResNet: _RESNET,
        ResNetV2: Plan(  # likewise
            stem=timm_resnetv2_blocks.STEM,
            stages=timm_resnetv2_blocks.STAGES,
            tail=timm_resnetv2_blocks.TAIL,
            block=timm_resnetv2_blocks.converted,
            new_stem=timm_resnetv2_blocks.stem,
            new_tail=timm_resnetv2_blocks.tail,
        ),
        RegNet: Plan(
            stem=timm_regnet_blocks.STEM,
            stages=timm_regnet_blocks.STAGES,
            tail=timm_regnet_blocks.TAIL,
            block=timm_regnet_blocks.converted,
            new_stem=timm_regnet_blocks.stem,
            new_tail=timm_regnet_blocks.tail,
        ),
    }
)


HEADS: Mapping[type[nn.Module], tuple[str, ...]] = MappingProxyType(
    {
        EfficientNet: ("global_pool", "classifier"),
        MobileNetV3: ("global_pool", "conv_head"),
        RegNet: ("head.global_pool", "head.fc"),
        ResNet: ("global_pool", "fc"),
    }
)
"""What of the head runs behind the tail, in its order; models of other classes give what stands there."""


def head_of(model: nn.Module) -> tuple[str, ...]:
    """Of the model's class."""
    return next((names for kind, names in HEADS.items() if isinstance(model, kind)), ())


def plan_of(model: nn.Module) -> Plan:
    """Of the model's class; one with named outputs is of a class of its own below that."""
    return next(plan for kind, plan in PLANS.items() if isinstance(model, kind))


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All blocks, ours and timm's, with their names in the order they run; a network cut short has fewer stages."""
    children = dict(model.named_children())
    stages = (name for name in plan_of(model).stages if name in children)
    return [block for name in stages for block in _in_stage(name, children[name])]


def _in_stage(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children of sequences and stages within sequences."""
    rows: list[tuple[str, nn.Module]] = []
    for child, each in module.named_children():
        path = f"{name}.{child}"
        rows += _in_stage(path, each) if type(each) in (nn.Sequential, ResNetStage) else [(path, each)]
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What is known of a model made of timm's for images of one shape [C,H,W]: the grids of the maps that enter and
    leave its blocks and what they stand in, by name, why blocks stay as they are, and timm's own model, without memory.
    """

    shape: tuple[int, int, int]
    maps: Maps
    kept: Mapping[str, str]
    library: nn.Module


def _outline(model: nn.Module, maps: Maps) -> Maps:
    """Those of blocks, and of what stands above and in front of them."""
    names = set(plan_of(model).stem)
    for name, _ in blocks_of(model):
        path = name.split(".")
        names |= {".".join(path[:depth]) for depth in range(1, len(path) + 1)}
    known = names & maps.behind.keys()
    return Maps(before={name: maps.before[name] for name in known}, behind={name: maps.behind[name] for name in known})


def converted(model: nn.Module, shape: tuple[int, int, int]) -> nn.Module:
    """A network of one of timm's plans with its blocks as rows of convolutions for images of this shape [C,H,W]; what
    isn't known stays timm's.
    """
    plan = plan_of(model)
    channels, *size = shape
    maps = maps_of(model, channels, (size[0], size[1]))
    modules: Parts = {}
    kept: dict[str, str] = {}
    for make in (plan.new_stem, plan.new_tail):
        with suppress(Unknown):  # it has no site
            modules |= make(model, maps)
    for name, block in blocks_of(model):
        try:
            modules[name] = plan.block(name, block, maps)
        except Unknown as error:
            kept[name] = str(error)
    own = replaced(model, modules)
    vars(own)["_conversion"] = Conversion(
        shape=shape, maps=_outline(model, maps), kept=kept, library=without_memory(model)
    )
    return own


def conversion_of(model: nn.Module) -> Conversion | None:
    """None for timm's own model."""
    conversions: dict[str, Conversion] = {key: value for key, value in vars(model).items() if key == "_conversion"}
    return conversions.get("_conversion")


def why_kept(name: str, model: nn.Module) -> str:
    """Why a block of timm's stays as it is."""
    conversion = conversion_of(model)
    if conversion is None:
        return "its library built it; a model that corp-deploy builds has another one of the same function"
    return conversion.kept[name]


def maps_in(model: nn.Module) -> Maps:
    """The grids of a model's blocks. Raises BadInput for timm's own model, which takes images of any size."""
    conversion = conversion_of(model)
    if conversion is None:
        raise BadInput(f"model is timm's own {type(model).__name__}, expected one that corp-deploy built from its name")
    return conversion.maps


def with_conv_blocks(model: nn.Module, size: Grid) -> nn.Module:
    """The model, in eval mode, with its blocks as rows of convolutions for images of this size; itself where it is no
    such network. Raises BadInput for a size that it doesn't take.
    """
    if not isinstance(model, ConvNet):
        return model
    try:
        return converted(model, (int(model.in_chans), *size))
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0][:150]
        raise BadInput(f"{type(model).__name__} doesn't take images of {size[0]}x{size[1]} ({reason})") from None


def own_state(model: nn.Module, state: State) -> dict[str, Tensor]:
    """Weights under timm's names as those of a model of rows of convolutions; where they don't fit they keep timm's
    names, as does what is none of timm's model.
    """
    conversion = conversion_of(model)
    if conversion is None:
        return dict(state)
    expected = {name: value.shape for name, value in conversion.library.state_dict().items()}
    known = {name: value for name, value in state.items() if name in expected}
    wanted = {name for name in expected if not name.endswith("num_batches_tracked")}
    if not wanted <= known.keys() or any(value.shape != expected[name] for name, value in known.items()):
        return dict(state)
    theirs = replaced(conversion.library, {}).to_empty(device=next(iter(known.values())).device)
    theirs.load_state_dict(known, strict=False, assign=True)
    beyond = {name: value for name, value in state.items() if name not in expected}
    return {**converted(theirs.eval(), conversion.shape).state_dict(), **beyond}
