"""corp_deploy.load and corp_deploy.sites."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from corp_deploy.families.architecture import Preprocessing
from corp_deploy.families.named_layers import with_named_sites
from ground.ports import Role

from .in_python import speaking_python
from .source import Source, opened


def load(model: Source | str | os.PathLike[str], *, trust_code: bool = False) -> nn.Module:
    """A model as an ordinary nn.Module in eval mode, on the CPU, in float32: of a directory written by corp-deploy, or
    of any other source.

    `trust_code`: whether the code of a model that has some may be run. Raises BadInput when a directory is missing,
    foreign or damaged, for weights that don't fit, and for code that isn't trusted.
    """
    with speaking_python(parameters=("trust_code",)):
        source = model if isinstance(model, Source) else Source(model, trust_code=trust_code)
        with opened(source) as checkpoint:
            return checkpoint.model


def sites(
    model: nn.Module,
    *,
    inputs: tuple[int, int, int],
    mlps: Mapping[str, tuple[str, ...]] | None = None,
    attentions: Mapping[str, Mapping[str, Any]] | None = None,
    output: Role = "logits",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> nn.Module:
    """A traced copy of any module of images [B,*inputs] of whose sites those are offered that are named; it has one
    output of this role.

    `mlps`: by the name of a module, the names inside it of the linear layers that hidden channels lie between, first
    and last, and of a gated MLP the first one that is not activated. `attentions`: by the name of a module `qkv` and
    `proj`, the names of its fused projection and of the output's, `heads`, and, where it is to be held against the
    program's, `scale`. `mean`, `std`: of the images' preprocessing.

    Everything that is said is looked for in the program. Raises BadInput for names that are none, for layers between
    which channels are mixed, for other heads than the program has, and for a module that can't be traced.
    """
    with speaking_python():
        settings = Preprocessing(mean=None if mean is None else tuple(mean), std=None if std is None else tuple(std))
        return with_named_sites(
            model,
            inputs=inputs,
            mlps=mlps or {},
            attentions=attentions or {},
            role=output,
            preprocessing=settings.for_channels(inputs[0]),
        )
