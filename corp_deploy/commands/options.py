"""Options that several commands share."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click

from perf.quantity import BATCH

from ..quantities import IMAGES, SEED
from .numbers import Number, Numbers

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

P = ParamSpec("P")
R = TypeVar("R")

FILE = click.Path(dir_okay=False, path_type=Path)
DIRECTORY = click.Path(file_okay=False, path_type=Path)
ANY_PATH = click.Path(path_type=Path)
BATCHES = Numbers(BATCH, example="1,8,32")


class JsonObject(click.ParamType[dict[str, Any]]):
    """A JSON object given on the command line."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError as error:
            self.fail(
                f"{value!r} is not JSON ({error}); expected an object such as '{{\"img_size\": 384}}'", param, ctx
            )
        if not isinstance(parsed, dict):
            self.fail(f"{value!r} is a JSON {type(parsed).__name__}, expected an object", param, ctx)
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
    weights: Path | None
    kwargs: Mapping[str, Any]

    def load(self) -> "Checkpoint":
        from ..checkpoint import load_dense

        return load_dense(self.model, weights=self.weights, kwargs=self.kwargs)


def model_options(command: Callable[P, R]) -> Callable[P, R]:
    """Add --model, --weights and --model-kwargs and hand the command a `ModelChoice` as `model`."""

    @click.option("--model", required=True, help="A timm name (with --weights) or a directory written by corp-deploy.")
    @click.option(
        "--weights", type=FILE, help="Trained weights: .safetensors, or .pth / .pt read without running code."
    )
    @click.option(
        "--model-kwargs", type=JsonObject(), default=None, help="Arguments for timm.create_model, a JSON object."
    )
    @wraps(command)
    def wrapped(*args: Any, model: str, weights: Path | None, model_kwargs: dict[str, Any] | None, **kwargs: Any) -> R:
        choice = ModelChoice(model=model, weights=weights, kwargs=model_kwargs or {})
        return command(*args, model=choice, **kwargs)  # type: ignore[arg-type]

    return wrapped  # type: ignore[return-value]


IMAGES_HELP = "A folder of images, or .npy / .npz / .safetensors with float32 [N,3,H,W] that is already preprocessed."
images_option = click.option("--images", type=ANY_PATH, required=True, help=IMAGES_HELP)
samples_option = click.option(
    "--samples", type=Number(IMAGES), default=None, help="Use this many images, drawn by --seed; default: all."
)
seed_option = click.option(
    "--seed", type=Number(SEED), default=0, show_default=True, help="Seed of the draw of --samples."
)
batch_size_option = click.option(
    "--batch-size", type=Number(BATCH), default=32, show_default=True, help="Images in one forward pass."
)
