"""Constructors for the stages of a release, and the commands and settings that stages have in common.

Imports no torch: the functions that do the work are imported when a stage runs.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from corp_deploy import __version__
from corp_deploy.invocation.option import Invocation, Record, path_from
from corp_deploy.machine import versions
from ground.places import Place

from . import names
from .baseline import Baseline
from .incremental import Stage, StageDirs
from .recipe import Recipe
from .recipe_keys import content_of


def step(name: str, *words: Any) -> Callable[[StageDirs], None]:
    def run(dirs: StageDirs) -> None:
        from . import release_steps, steps

        functions: dict[str, Callable[..., object]] = {
            "dense": release_steps.write_dense,
            "calibrate": steps.write_calibration,
            "reduce": steps.write_reduced,
            "size": steps.write_size,
            "export": steps.write_graphs,
            "samples": steps.write_samples,
            "verify": steps.write_parity,
            "engine": release_steps.write_engines,
            "target-parity": release_steps.write_target_parity,
            "bench": steps.write_bench,
            "gate": release_steps.write_verdicts,
            "package": steps.write_package,
            "report": release_steps.write_release_report,
            "manifest": release_steps.write_release_manifest,
        }
        functions[name](dirs, *words)

    return run


def stage(
    name: str,
    command: Invocation,
    run: Callable[[StageDirs], None] | None = None,
    *,
    outputs: Sequence[str],
    reads: Sequence[str] = (),
    outside: Mapping[str, Place | None] = MappingProxyType({}),
    settings: Mapping[str, Any] = MappingProxyType({}),
    tools: Sequence[str] = (),
    missing: Callable[[], str | None] = lambda: None,
    machine: Callable[[], Mapping[str, Any]] | None = None,
    earlier: Callable[[], tuple[Mapping[str, Place], Mapping[str, Any]]] = lambda: ({}, {}),
) -> Stage:
    """Return a stage that carries out a command: by `run`, or by default by the command's own function in steps.

    `outside` maps labels to paths; None is left out. `tools` are the packages whose versions decide the result; stages
    on a GPU have none, since the machine with the GPU has versions of its own.
    """
    here = versions()
    return Stage(
        name=name,
        outputs=tuple(outputs),
        run=run or step(command.command, command),
        reads=tuple(dict.fromkeys(reads)),
        outside={label: path for label, path in outside.items() if path is not None},
        settings={
            **settings,
            "versions": {"corp-deploy": __version__} | {each: here[each] for each in tools if each in here},
        },
        missing=missing,
        machine=machine,
        earlier=earlier,
        command=str(command),
    )


def release_call(recipe: Recipe, baseline: Baseline, root: Path, *only: str) -> Invocation:
    """Return the command `release` for all stages, or `only` some, to be run in the release's directory."""
    measures = not only or only[0].startswith(names.PARITY_OF_TARGET)
    options = {"output": ".", "only": [*only], **baseline_options(baseline, root), **recipe.trust(measures=measures)}
    return Invocation(command="release", arguments=(names.RECIPE,), options=options)


def stage_call(stage: str, recipe: Recipe) -> Invocation:
    """Return the command `release --only STAGE`, to be run in the release's directory."""
    return release_call(recipe, Baseline(), Path(), stage)


def baseline_options(baseline: Baseline, root: Path) -> dict[str, Any]:
    return {
        name: path_from(root, value) if isinstance(value, Path) else value
        for name, value in baseline.command_options.items()
    }


def settings_of(name: str, table: Record, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values of a recipe's table that are set, by keys with the table's name, such as reduce.mlp."""
    return {f"{name}.{key}": value for key, value in content_of(table, Path()).items() if key not in without}
