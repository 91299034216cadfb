"""A model as it is named on the command line."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from corp_deploy.invocation.source import Source
from corp_deploy.views.console import Output

from .options import usage_errors

if TYPE_CHECKING:
    from corp_deploy.store.checkpoint import Checkpoint

MODEL_HELP = (
    "A timm name (with --weights), a directory written by corp-deploy, a snapshot of a timm repository, hf:DIR, a "
    "vision transformer, text encoder or decoder of transformers, torchvision:vit_b_16 and its like "
    "(with --weights), module:PATH.py:FUNCTION (with --trust-code), or a .toml file with [model] that says all of "
    "it: a recipe, or what calibrate writes beside its moments."
)


class ModelChoice(Source):
    """Which model, what goes with a name of timm's (weights, arguments, preprocessing), and its outputs by name."""

    @property
    def model(self) -> str:
        return os.fspath(self.name)

    def look(self, out: Output) -> "Checkpoint":
        """The model to be looked at and not run: without any weights where it is named without."""
        from corp_deploy.store.dense_model import comes_with_weights, without_weights

        if self.weights is not None or comes_with_weights(self.model):
            return self.load(out)
        out.note(f"{self.model}: without weights, as none are given")
        return without_weights(self.model, self.kwargs or {}, self.preprocessing, self.named_outputs)

    def load(self, out: Output) -> "Checkpoint":
        """The model, after what there is to say about its weights."""
        checkpoint = self.opened()
        for note in checkpoint.notes:
            out.note(note)
        return checkpoint


def chosen_model(model: str | Path, **options: Any) -> ModelChoice:
    """What is named, or what a file says that is named."""
    from corp_deploy.release.recipe_file import as_named

    with usage_errors():
        choice = ModelChoice(model, **options)
    return as_named(choice)


@contextmanager
def as_directory(path: Path, out: Output) -> Iterator[Path]:
    """The path itself; where it is a file that names a model, a directory of that for as long as this is open."""
    if path.suffix != ".toml":
        yield path
        return
    from corp_deploy.store.checkpoint import save

    with TemporaryDirectory() as scratch:
        save(chosen_model(path).load(out), Path(scratch) / path.stem)
        yield Path(scratch) / path.stem
