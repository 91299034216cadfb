"""Guards inputs: no command overwrites what it reads; the trained model, images and records outlive their results."""

from collections.abc import Iterator
from pathlib import Path

import click

from corp_deploy.store.hub_snapshot import PREFIX

WRITTEN = ("output", "summary")
BESIDE = {"verify": ".npz"}  # what is written beside the output, by its suffix
IN_A_MODEL = ("config.json", "model.safetensors")


def _paths(context: click.Context, parameter: click.Parameter) -> Iterator[Path]:
    value = context.params.get(parameter.name or "")
    for each in value if isinstance(value, tuple) else (value,):
        if isinstance(each, Path) or (isinstance(each, str) and parameter.name in ("model", "dense")):
            yield Path(str(each).removeprefix(PREFIX))


def _read(path: Path) -> tuple[Path, ...]:
    return (path, *(path / name for name in IN_A_MODEL)) if path.is_dir() else (path,)


def refuse_own_inputs(context: click.Context) -> None:
    """Raise UsageError where a result would stand in the place of something that it is made from."""
    parameters = context.command.params
    written = [path for each in parameters if each.name in WRITTEN for path in _paths(context, each)]
    beside = BESIDE.get(context.command.name or "")
    written += [path.with_suffix(beside) for path in written if beside]
    if saved_as := context.params.get("save_as"):
        written += [path / saved_as for path in written]
    sources = [path for each in parameters if each.name not in WRITTEN for path in _paths(context, each)]
    read = [own for path in sources for own in _read(path)]
    for path in written:
        for own in read:
            if path.exists() and own.exists() and path.samefile(own):
                raise click.UsageError(f"{path}: the result would replace what it is made from; give --output another")
