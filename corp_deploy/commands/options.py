"""Options that several commands share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click
from click.core import ParameterSource

from corp_deploy.families.preprocessing import CROP_MODES, INTERPOLATIONS, Preprocessing
from corp_deploy.views.console import Output
from ground.errors import BadInput
from ground.files import object_from_text
from ground.quantities import BAD_IMAGES, DEVIATION, IMAGES, MEAN, SEED, SHARE_KEPT, WORKERS
from ground.quantity import BATCH, shown

from .numbers import Channels, Number, Numbers
from .own_inputs import refuse_own_inputs

if TYPE_CHECKING:
    from corp_deploy.store.checkpoint import Checkpoint

P = ParamSpec("P")
R = TypeVar("R")


class RegularPath(click.Path):
    """A file or directory where there is anything: a pipe would be waited on for ever, a device be replaced."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value) == "":
            self.fail("an empty path names nothing", param, ctx)
        path: Any = super().convert(value, param, ctx)
        if path.exists() and not path.is_file() and not path.is_dir():
            self.fail(f"{path} is a pipe, socket or device, expected a regular file or a directory", param, ctx)
        return path


FILE = RegularPath(dir_okay=False, path_type=Path)
DIRECTORY = RegularPath(file_okay=False, path_type=Path)
ANY_PATH = RegularPath(path_type=Path)
BATCHES = Numbers(BATCH, example="1,8,32")


class JsonObject(click.ParamType[dict[str, Any]]):
    """A JSON object given on the command line."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        try:
            parsed = object_from_text(str(value), where=shown(str(value)))
        except BadInput as error:
            self.fail(f"{error}; expected an object such as '{{\"img_size\": 384}}'", param, ctx)
        return parsed


class Words(click.ParamType[tuple[str, ...]]):
    """Comma-separated words out of a fixed set."""

    name = "word,word,..."

    def __init__(self, *allowed: str) -> None:
        self.allowed = allowed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        words = value if isinstance(value, tuple) else tuple(part.strip() for part in str(value).split(","))
        for word in words:
            if word not in self.allowed:
                self.fail(f"{word!r} is none of {', '.join(self.allowed)}", param, ctx)
        return tuple(dict.fromkeys(words))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """A model as named on the command line."""

    model: str
    weights: Path | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    ema: bool | None = None
    preprocessing: Preprocessing = field(default_factory=Preprocessing)

    def load(self, out: Output) -> "Checkpoint":
        """The model, after what there is to say about its weights."""
        from corp_deploy.store.dense_model import load_dense

        checkpoint = load_dense(
            self.model, weights=self.weights, kwargs=self.kwargs, ema=self.ema, preprocessing=self.preprocessing
        )
        for note in checkpoint.notes:
            out.note(note)
        return checkpoint


_DENSE_OPTIONS = (
    click.option("--weights", type=FILE, help="Trained weights: .safetensors, .pth, .pt, .pth.tar, .bin, .ckpt."),
    click.option("--model-kwargs", type=JsonObject(), default=None, help="Arguments for timm's model, a JSON object."),
    click.option("--ema/--no-ema", default=None, help="Moving-average weights or raw ones; default: as timm does."),
    click.option("--mean", type=Channels(MEAN), default=None, help="Mean pixel of the training; default: timm's."),
    click.option("--std", type=Channels(DEVIATION), default=None, help="Deviation of its pixels; default: timm's."),
    click.option("--crop-pct", type=Number(SHARE_KEPT), default=None, help="Share of a side that the crop keeps."),
    click.option("--interpolation", type=click.Choice(INTERPOLATIONS), default=None, help="How images are resized."),
    click.option("--crop-mode", type=click.Choice(CROP_MODES), default=None, help="How what is not square is cropped."),
)


def dense_options(command: Callable[P, R]) -> Callable[P, R]:
    """Add what a timm name needs beside it, and hand the command a `ModelChoice` as `model` in place of its name."""

    @wraps(command)
    def wrapped(
        *args: Any,
        model: str,
        weights: Path | None,
        model_kwargs: dict[str, Any] | None,
        ema: bool | None,
        mean: tuple[float, ...] | None,
        std: tuple[float, ...] | None,
        crop_pct: float | None,
        interpolation: str | None,
        crop_mode: str | None,
        **kwargs: Any,
    ) -> R:
        choice = ModelChoice(
            model=model,
            weights=weights,
            kwargs=model_kwargs or {},
            ema=ema,
            preprocessing=Preprocessing(
                mean=mean, std=std, crop_pct=crop_pct, interpolation=interpolation, crop_mode=crop_mode
            ),
        )
        return command(*args, model=choice, **kwargs)  # type: ignore[arg-type]

    for option in reversed(_DENSE_OPTIONS):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]


MODEL_HELP = "A timm name (with --weights), a directory written by corp-deploy, or a snapshot of a timm repository."


def model_options(command: Callable[P, R]) -> Callable[P, R]:
    """Add --model and what goes with it, and hand the command a `ModelChoice` as `model`."""
    return click.option("--model", required=True, help=MODEL_HELP)(dense_options(command))


IMAGES_HELP = "A folder of images, or .npy / .npz / .safetensors with float32 [N,3,H,W] that is already preprocessed."
images_option = click.option("--images", type=ANY_PATH, required=True, help=IMAGES_HELP)
samples_option = click.option(
    "--samples", type=Number(IMAGES), default=None, help="Use this many images, drawn by --seed; default: all."
)
seed_option = click.option(
    "--seed", type=Number(SEED), default=0, show_default=True, help="Seed of the draw of --samples."
)
workers_option = click.option(
    "--workers", type=Number(WORKERS), default=0, show_default=True, help="Processes that decode images."
)
max_bad_option = click.option(
    "--max-bad", type=Number(BAD_IMAGES), default=0, show_default=True, help="Unreadable images to skip."
)
batch_size_option = click.option(
    "--batch-size", type=Number(BATCH), default=32, show_default=True, help="Images in one forward pass."
)


def given_options() -> dict[str, Any]:
    """What the user gave to the command at work, defaults left out; a list for an option that may be repeated."""
    context = click.get_current_context()
    defaults = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
    return {
        name: list(value) if parameter.multiple else value
        for parameter in context.command.params
        if isinstance(parameter, click.Option)
        and (name := parameter.name) is not None
        and name in context.params
        and context.get_parameter_source(name) not in defaults
        and (value := context.params[name]) is not None
    }


def output_options(command: Callable[P, R]) -> Callable[P, R]:
    """Add --json and --quiet and hand the command an `Output` as `out`."""

    @click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
    @click.option("--quiet", "-q", is_flag=True, help="No progress, no table; errors and warnings still show.")
    @wraps(command)
    def wrapped(*args: Any, as_json: bool, quiet: bool, **kwargs: Any) -> R:
        refuse_own_inputs(click.get_current_context())
        return command(*args, out=Output(json=as_json, quiet=quiet), **kwargs)  # type: ignore[arg-type]

    return wrapped  # type: ignore[return-value]
