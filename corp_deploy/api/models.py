"""Models and inputs from files or memory, and the functions corp_deploy.load and corp_deploy.sites."""

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from calib.batches import Batches, are_pictures, array_of_entry, has_images, image_entry
from calib.inputs import InputSet
from calib.moments import Moments
from corp_deploy.families.family import with_outputs
from corp_deploy.families.given_module import available_module, inputs_of_arrays
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
from corp_deploy.traced.models.array_inputs import parameters_of
from ground.errors import BadInput
from ground.places import Place, place_from_text
from ground.ports import Role

from .in_python import errors_in_python
from .values import InputsLike


def open_inputs(model: nn.Module, given: Place | Batches, **how: Any) -> InputSet:
    """Return the inputs of a path or in memory as the model takes them: images, texts, token ids or arrays by name.

    `how` are the options of drawing and decoding. Raises BadInput for inputs that the model doesn't take.
    """
    opened_set = inputs_for_model(model, given, **how)
    if opened_set.skipped:
        warnings.warn(left_out(place_from_text(str(given)), opened_set), stacklevel=4)
    return opened_set


@dataclass(frozen=True, kw_only=True)
class Source(ModelSource):
    __doc__ = (
        (ModelSource.__doc__ or "")
        + """
    In Python `name` may also be a module in memory, with `kwargs` of its constructor that it doesn't show, or with the
    size of its inputs: {"input_size": (3, 32, 32)}. A directory that was reduced from a module which no library makes
    needs that `module` beside it.
    """
    )

    name: PathLike | nn.Module = field(kw_only=False)  # type: ignore[assignment]
    module: nn.Module | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str | os.PathLike | nn.Module):
            kind = type(self.name).__name__
            raise BadInput(f"model is {self.name!r:.60} ({kind}), expected a name, a directory or a module")
        with errors_in_python(ModelSource, parameters=("trust_code",)):
            super().__post_init__()


ModelLike: TypeAlias = Source | str | os.PathLike[str] | nn.Module


@dataclass(frozen=True, kw_only=True)
class OfModel(Record):
    """Base of the parameters of functions on a model: `model`, the first and positional one."""

    model: ModelLike = field(kw_only=False)


@dataclass(frozen=True, kw_only=True)
class OnInputs(OfModel):
    """Base of the parameters of functions that need inputs, the second and positional one."""

    inputs: InputsLike = field(kw_only=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A written file or directory, by its `path`, which `os.fspath` returns too."""

    path: Path

    def __fspath__(self) -> str:
        return os.fspath(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory(Written):
    """The directory of a model, with the `module` that it needs if no library makes its model."""

    module: nn.Module | None = None


def in_memory(model: ModelLike) -> nn.Module | None:
    named = model.name if isinstance(model, Source) else model
    return unwrapped(named) if isinstance(named, nn.Module) else None


Example: TypeAlias = Place | Batches | Moments | None


def _inputs_shown(model: nn.Module, example: Example) -> dict[str, Any]:
    if isinstance(example, Moments):
        record = json.loads(example.lineage.get("preprocessing", "{}"))
        return {name: record[name] for name in ("input_size", "inputs") if name in record}
    if not isinstance(example, Batches):
        return {}
    shown = example.first.inputs
    if isinstance(shown, Mapping):
        taken = {name: shown[name] for name in parameters_of(model) if name in shown}
        shown = taken or (image_entry(shown) if has_images(shown) else shown)
    if are_pictures(shown) or (has_images({"": shown}) and "float" not in str(shown.dtype)):
        return {}
    return inputs_of_arrays(model, shown if isinstance(shown, Mapping) else array_of_entry(shown))


def _of_module(named: Source, module: nn.Module, example: Example) -> Checkpoint:
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
    """Return a context for loading model directories with the `module` of the first that is a Directory, if any."""
    every = directories if isinstance(directories, list | tuple) else [directories]
    return available_module(next((each.module for each in every if isinstance(each, Directory)), None))


@contextmanager
def open_model(model: ModelLike, example: Example = None) -> Iterator[Checkpoint]:
    """Yield the model of a source, a path or a module in memory; a model's own code may run within this context.

    `example` are inputs or moments that show what a module takes.

    Raises BadInput for a path without a model, and as load does.
    """
    named = model if isinstance(model, Source) else Source(model)
    if not isinstance(named.name, str | os.PathLike):
        require_module(named.name, "model: got")
    own = in_memory(named)
    if own is not None:
        with available_module(own):
            yield _of_module(named, own, example)
        return
    if str(named.name).endswith(".toml"):
        from corp_deploy.release.recipe_file import resolve_toml_source  # loading a directory needs no recipes

        named = resolve_toml_source(named)
    assert not isinstance(named.name, nn.Module), named
    if isinstance(named.name, os.PathLike) and not Path(named.name).is_dir():
        raise BadInput(f"{os.fspath(named.name)}: no such directory, expected one that corp-deploy wrote")
    with trusting_code(named.trust_code), available_module(named.module), module_beside(named.name):
        yield named.opened()


def load(model: Source | str | os.PathLike[str], *, trust_code: bool = False) -> nn.Module:
    """Load a model as an ordinary nn.Module in eval mode, on the CPU, in float32.

    Args:
        model: A directory written by corp-deploy, or any other source.
        trust_code: True if the code that comes with a model may be run.

    Raises:
        BadInput: A directory is missing, foreign or damaged, weights don't fit, or code isn't trusted.
    """
    with errors_in_python(parameters=("trust_code",)):
        source = model if isinstance(model, Source) else Source(model, trust_code=trust_code)
        with open_model(source) as checkpoint:
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
    """Return a traced copy of a module of images in which only the named sites can be reduced.

    All names are checked against the traced program.

    Args:
        model: A module with one output.
        inputs: The shape of one image, [C, H, W].
        mlps: By the name of a module, the names inside it of the first and last linear layer around hidden channels,
            and for a gated MLP that of the first layer without an activation.
        attentions: By the name of a module, the names `qkv` and `proj` of its fused projection and of its output
            projection, its number of `heads` and, to be checked, its `scale`.
        output: The role of the output.
        mean: The mean of the images' preprocessing.
        std: The standard deviation of the images' preprocessing.

    Raises:
        BadInput: A name doesn't exist, channels are mixed between the layers, the heads differ from the program's, or
            the module can't be traced.
    """
    with errors_in_python():
        settings = Preprocessing(mean=None if mean is None else tuple(mean), std=None if std is None else tuple(std))
        return with_named_sites(
            model,
            inputs=inputs,
            mlps=mlps or {},
            attentions=attentions or {},
            role=output,
            preprocessing=settings.for_channels(inputs[0]),
        )
