"""Which model: as `--model` and what goes beside it name it, or a module that is in memory."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from corp_deploy.families.outputs import Outputs
from corp_deploy.families.preprocessing import Preprocessing
from corp_deploy.families.trusted_code import trusting_code
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.module_model import checkpoint_from_module
from ground.errors import BadInput

PathLike: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from, and what of it is set otherwise.

    `name`: a timm name (with `weights`), a directory written by corp-deploy or a snapshot of one of timm's
    repositories, `hf:DIR` of transformers, `torchvision:NAME` (with `weights`), or `module:PATH.py:FUNCTION` (with
    `trust_code`). `kwargs` are the arguments of its library; `ema` takes the moving average of the weights (True) or
    the raw ones (False); `mean` and `std` (a number for all channels, or one for each), `crop_pct` in (0, 1],
    `interpolation` and `crop_mode` go before the model's own preprocessing; `outputs` are what it gives, by name:
    ("class", "patches", "block8"). Nothing is read before a function is given it, and nothing is ever downloaded.
    """

    name: PathLike
    weights: PathLike | None = None
    _: KW_ONLY
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    ema: bool | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    crop_pct: float | None = None
    interpolation: str | None = None
    crop_mode: str | None = None
    outputs: Sequence[str] | None = None
    trust_code: bool = False


ModelLike: TypeAlias = Source | str | os.PathLike[str] | nn.Module


def _loaded(source: Source) -> Checkpoint:
    preprocessing = Preprocessing(
        mean=None if source.mean is None else tuple(source.mean),
        std=None if source.std is None else tuple(source.std),
        crop_pct=source.crop_pct,
        interpolation=source.interpolation,
        crop_mode=source.crop_mode,
    )
    return load_dense(
        os.fspath(source.name),
        weights=None if source.weights is None else Path(source.weights),
        kwargs=source.kwargs,
        ema=source.ema,
        preprocessing=preprocessing,
        outputs=None if source.outputs is None else Outputs(tuple(source.outputs)),
    )


@contextmanager
def opened(model: ModelLike) -> Iterator[Checkpoint]:
    """The model of a source, of a path or of timm's module, for as long as its own code may be run, where it has some.

    Raises BadInput for a path where nothing is, and as load does.
    """
    if isinstance(model, nn.Module):
        yield checkpoint_from_module(model)
        return
    source = model if isinstance(model, Source) else Source(model)
    if isinstance(source.name, os.PathLike) and not Path(source.name).is_dir():
        raise BadInput(f"{os.fspath(source.name)}: no such directory, expected one that corp-deploy wrote")
    with trusting_code(source.trust_code):
        yield _loaded(source)
