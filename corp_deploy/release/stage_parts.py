"""What stages are made of: how one is run, and what its result depends on. Imports no torch."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec.structs import asdict

from corp_deploy import __version__
from corp_deploy.invocation.option import Invocation
from corp_deploy.machine import versions

from .incremental import Stage, StageDirs
from .recipe import Recipe
from .recipe_record import Table

TORCH = ("torch", "timm", "numpy")


def settings_of(name: str, table: Table, *, without: Sequence[str] = ()) -> dict[str, Any]:
    return {f"{name}.{key}": value for key, value in asdict(table).items() if key not in without}


def step(name: str, *words: Any) -> Callable[[StageDirs], None]:
    """What a command, or a release alone, does in a stage; imported when it is called."""

    def run(dirs: StageDirs) -> None:
        from . import release_steps, sample_steps, size_step, steps

        functions: dict[str, Callable[..., object]] = {
            "dense": release_steps.write_dense,
            "calibrate": steps.write_moments,
            "reduce": steps.write_reduced,
            "size": size_step.write_size,
            "export": steps.write_graphs,
            "samples": sample_steps.write_samples,
            "verify": steps.write_parity,
            "engine": release_steps.write_engines,
            "target-parity": release_steps.write_target_parity,
            "bench": steps.write_bench,
            "gate": release_steps.write_gate,
            "package": steps.write_package,
            "report": release_steps.write_report,
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
    outside: Mapping[str, Path | None] = MappingProxyType({}),
    settings: Mapping[str, Any] = MappingProxyType({}),
    tools: Sequence[str] = (),
    missing: Callable[[], str | None] = lambda: None,
) -> Stage:
    """What this command does, or `run` in its place; a file that may be `outside` is None where it isn't asked for.
    `tools`: the packages that its result depends on. A GPU's stages name none: that machine has others.
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
        command=str(command),
    )


def heads_read(recipe: Recipe) -> dict[str, Path]:
    of_metrics = {f"parity.metric_files.{place}": path for place, path in enumerate(recipe.parity.metric_files)}
    return {f"parity.head.{place}": path for place, path in enumerate(recipe.parity.head)} | of_metrics
