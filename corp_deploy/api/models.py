"""Which model and which inputs, of files or in memory: corp_deploy.load and corp_deploy.sites."""

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor, nn

from calib.inputs import InputSet
from calib.moments import Moments
from corp_deploy.families.family import with_outputs
from corp_deploy.families.given_module import available_module, taken_of_arrays
from corp_deploy.families.named_layers import with_named_sites
from corp_deploy.families.plain_module import require_module, unwrapped
from corp_deploy.invocation.option import PathLike as PathLike
from corp_deploy.invocation.option import Record
from corp_deploy.invocation.source import ModelSource
from corp_deploy.spec.architecture import Preprocessing
from corp_deploy.spec.trusted_code import trusting_code
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.input_sets import inputs_for_model, left_out
from corp_deploy.store.module_model import checkpoint_from_module
from ground.errors import BadInput
from ground.ports import Role

from .in_python import speaking_python
from .values import InputsLike, as_file, refuse_other_inputs


@contextmanager
def opened_inputs(model: nn.Module, inputs: InputsLike, **how: Any) -> Iterator[InputSet]:
    """What the model takes, of a path or of an array: images, or texts of a file, or token ids of a decoder, or arrays
    by the names of its inputs; `how` they are drawn and decoded. Raises BadInput for what it doesn't take.
    """
    with as_file(inputs) as path:
        opened_set = inputs_for_model(model, path, **how)
        if opened_set.skipped:
            warnings.warn(left_out(path, opened_set), stacklevel=5)
        yield opened_set


@dataclass(frozen=True, kw_only=True)
class Source(ModelSource):
    __doc__ = (
        (ModelSource.__doc__ or "")
        + """
    In Python `name` may be a module that is in memory too, with `kwargs` that it was made with and doesn't show, or
    with what it takes: {"input_size": (3, 32, 32)}. `module` is what a directory needs beside it that was reduced from
    a module which no library makes.
    """
    )

    name: PathLike | nn.Module = field(kw_only=False)  # type: ignore[assignment]
    module: nn.Module | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str | os.PathLike | nn.Module):
            kind = type(self.name).__name__
            raise BadInput(f"model is {self.name!r:.60} ({kind}), expected a name, a directory or a module")
        with speaking_python(ModelSource, parameters=("trust_code",)):
            super().__post_init__()


ModelLike: TypeAlias = Source | str | os.PathLike[str] | nn.Module


@dataclass(frozen=True, kw_only=True)
class OfModel(Record):
    """What a call begins with."""

    model: ModelLike = field(kw_only=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a function wrote: `path`, which `os.fspath` gives too."""

    path: Path

    def __fspath__(self) -> str:
        return os.fspath(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory(Written):
    """A model's; `module`: what it needs beside it, where that was in memory and no library makes it."""

    module: nn.Module | None = None


def in_memory(model: ModelLike) -> nn.Module | None:
    named = model.name if isinstance(model, Source) else model
    return unwrapped(named) if isinstance(named, nn.Module) else None


def _inputs_shown(model: nn.Module, example: InputsLike | Moments | None) -> dict[str, Any]:
    if isinstance(example, Moments):
        record = json.loads(example.lineage.get("preprocessing", "{}"))
        return {name: record[name] for name in ("input_size", "inputs") if name in record}
    if isinstance(example, np.ndarray | Tensor):
        is_pixels = example.ndim == 4 and "float" not in str(example.dtype)
        return {} if is_pixels else taken_of_arrays(model, example)
    return taken_of_arrays(model, example) if isinstance(example, Mapping) else {}


def _of_module(named: Source, module: nn.Module, example: InputsLike | Moments | None) -> Checkpoint:
    beside = {
        "weights": named.weights,
        "ema": named.ema,
        "weights_key": named.weights_key,
        **named.preprocessing.settings,
    }
    if odd := [name for name, value in beside.items() if value is not None]:
        raise BadInput(f"Source of a module in memory, which has its own {', '.join(odd)}; leave {odd[0]} away")
    found = checkpoint_from_module(module, named.kwargs or {}, _inputs_shown(module, example))
    return replace(found, model=with_outputs(found.model, named.named_outputs))


def module_beside(directories: PathLike | Sequence[PathLike]) -> AbstractContextManager[None]:
    """Within it directories of a module in memory load beside it, where one of these brings it."""
    every = directories if isinstance(directories, list | tuple) else [directories]
    return available_module(next((each.module for each in every if isinstance(each, Directory)), None))


@contextmanager
def opened(model: ModelLike, example: InputsLike | Moments | None = None) -> Iterator[Checkpoint]:
    """The model of a source, of a path or of a module in memory, for as long as its own code may be run, where it has
    some. `example`: inputs or moments that show what a module takes.

    Raises BadInput for a path where nothing is, and as load does.
    """
    if example is not None and not isinstance(example, Moments):
        refuse_other_inputs(example)
    named = model if isinstance(model, Source) else Source(model)
    if not isinstance(named.name, str | os.PathLike):
        require_module(named.name, "model: got")
    own = in_memory(named)
    if own is not None:
        with available_module(own):
            yield _of_module(named, own, example)
        return
    if str(named.name).endswith(".toml"):
        from corp_deploy.release.recipe_file import as_named  # loading a directory needs no recipes

        named = as_named(named)
    assert not isinstance(named.name, nn.Module), named
    if isinstance(named.name, os.PathLike) and not Path(named.name).is_dir():
        raise BadInput(f"{os.fspath(named.name)}: no such directory, expected one that corp-deploy wrote")
    with trusting_code(named.trust_code), available_module(named.module), module_beside(named.name):
        yield named.opened()


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
