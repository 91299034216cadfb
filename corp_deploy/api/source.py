"""Which model: as `--model` and what goes beside it name it, or a module that is in memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from torch import nn

from corp_deploy.families.trusted_code import trusting_code
from corp_deploy.invocation.option import PathLike as PathLike
from corp_deploy.invocation.source import Source as Source
from corp_deploy.release.recipe_file import as_named
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.module_model import checkpoint_from_module
from ground.errors import BadInput

ModelLike: TypeAlias = Source | str | os.PathLike[str] | nn.Module


@contextmanager
def opened(model: ModelLike) -> Iterator[Checkpoint]:
    """The model of a source, of a path or of timm's module, for as long as its own code may be run, where it has some.

    Raises BadInput for a path where nothing is, and as load does.
    """
    if isinstance(model, nn.Module):
        yield checkpoint_from_module(model)
        return
    source = as_named(model if isinstance(model, Source) else Source(model))
    if isinstance(source.name, os.PathLike) and not Path(source.name).is_dir():
        raise BadInput(f"{os.fspath(source.name)}: no such directory, expected one that corp-deploy wrote")
    with trusting_code(source.trust_code):
        yield source.opened()
