"""The family of modules whose sites their user named (named_sites.py), and the builder of whatever a user's code makes.

Such a module is run whole: nothing is known of what lies between its sites.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from calib.inputs import Inputs
from ground.errors import BadInput
from ground.ports import LOGITS, OutputPort

from .architecture import Architecture
from .named_sites import NamedSites, Naming, sites_by_name, with_naming
from .preprocessing import Preprocessing
from .sites import Sites
from .steps import Step
from .timm_images import ImageSpec
from .trusted_code import FAMILY, Code

NAME = FAMILY
UNMERGEABLE = "a module whose sites are named is run whole, and what lies between them may need every token"
# As torchvision and timm train most classifiers of ImageNet.
PREPARED = {
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "crop_pct": 0.875,
    "interpolation": "bicubic",
    "crop_mode": "center",
}
_WHOLE = (
    "a module whose sites are named is run whole, so no block can be followed; leave away --polish and --merge-tokens"
)


def _naming(model: nn.Module) -> Naming:
    assert isinstance(model, NamedSites), type(model)
    return model.naming


def accepts(model: nn.Module) -> bool:
    return isinstance(model, NamedSites)


def code_of(architecture: Architecture) -> Code:
    """The code that makes the model."""
    kwargs = architecture.kwargs
    file, function = architecture.name.rsplit(":", 1) if ":" in architecture.name else (architecture.name, "")
    source = kwargs.get("source")
    if not isinstance(source, str) or not isinstance(kwargs.get("arguments"), Mapping):
        raise BadInput(f"{architecture.name}: no source and arguments of a model's code; write the model again")
    return Code(file=file, function=function, source=source)


def architecture_of(code: Code, arguments: Mapping[str, Any], preprocessing: Preprocessing) -> Architecture:
    """What config.json keeps: the source itself, so that a directory needs no other file."""
    kwargs = {"source": code.source, "arguments": dict(arguments)}
    name = f"{code.file}:{code.function}"
    return Architecture(name=name, kwargs=kwargs, preprocessing=preprocessing, family=NAME)


def build(architecture: Architecture) -> nn.Module:
    """What the code makes, on the CPU whatever torch's default device is, since it may look at values: a module
    with named sites or a model of any family. Raises BadInput where code isn't trusted, and for what is no module.
    """
    code = code_of(architecture)
    with torch.device("cpu"):
        model = code.called(dict(architecture.kwargs["arguments"]))
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"{code.file}: {code.function}() gives a {type(model).__name__}, expected a torch.nn.Module: one of a "
            "known family, or corp_deploy.sites(...) of any other"
        )
    if isinstance(model, NamedSites):
        asked = {**asdict(model.naming.preprocessing), **architecture.preprocessing.settings}
        model = with_naming(model, replace(model.naming, preprocessing=replace(model.naming.preprocessing, **asked)))
    return model.eval().requires_grad_(False)


def sites(model: nn.Module) -> Sites:
    """Those that were named."""
    return sites_by_name(model, _naming(model))


def steps(model: nn.Module, *, read: Tensor | None = None) -> Iterator[Step]:
    """None are known."""
    return iter(())


def embedded(model: nn.Module, inputs: Inputs) -> Tensor:
    """Raises BadInput: there is no stream to follow."""
    raise BadInput(f"{type(model).__name__}: {_WHOLE}")


def finished(model: nn.Module, x_BNC: Tensor, inputs: Inputs, sources_BM: Tensor | None = None) -> Tensor:
    """Raises BadInput: there is no stream that it could be of."""
    raise BadInput(f"{type(model).__name__}: {_WHOLE}")


def normed(model: nn.Module, x_BNC: Tensor) -> Tensor:
    """Raises BadInput: there is no stream that it could be of."""
    raise BadInput(f"{type(model).__name__}: {_WHOLE}")


def token_kinds(model: nn.Module) -> tuple[str, ...]:
    """None are known."""
    return ()


def grid(model: nn.Module, layer: str) -> None:
    """Tokens make no map."""


def depth(model: nn.Module) -> int:
    """Blocks aren't known; sites are."""
    return len(sites(model).every)


def input_spec(model: nn.Module) -> ImageSpec:
    """As it was said with the sites, else as most classifiers of ImageNet."""
    naming = _naming(model)
    prepared = PREPARED | naming.preprocessing.spread(naming.shape[0]).settings
    return ImageSpec(shape=naming.shape, config={**prepared, "input_size": naming.shape})


def output_ports(model: nn.Module) -> tuple[OutputPort, ...]:
    return (OutputPort(name=LOGITS.name, role=_naming(model).role),)


def classes(model: nn.Module) -> int:
    """How many classes its output tells apart; 0 for one that is none of logits."""
    if _naming(model).role not in ("logits", "token logits"):
        return 0
    with torch.no_grad():
        where = next(model.parameters())
        return int(model(torch.zeros(1, *_naming(model).shape, device=where.device, dtype=where.dtype)).shape[-1])
