"""What stages are made of: how one is run, and what its result depends on. Imports no torch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from corp_deploy import __version__
from corp_deploy.invocation.call import Invocation
from corp_deploy.machine import versions

from .incremental import StageDirs
from .recipe import Recipe
from .recipe_record import Table

TORCH = ("torch", "timm", "numpy")


def tool(*packages: str) -> dict[str, str]:
    """Versions that a stage's result depends on. A GPU's stages name none: that machine has others."""
    here = versions()
    return {"corp-deploy": __version__} | {name: here[name] for name in packages if name in here}


def settings_of(name: str, table: Table, *, without: Sequence[str] = ()) -> dict[str, Any]:
    return {f"{name}.{key}": value for key, value in asdict(table).items() if key not in without}


def own_step(name: str, *words: Any) -> Callable[[StageDirs], None]:
    """What no command does, imported when it is called."""

    def run(dirs: StageDirs) -> None:
        from . import release_steps, sample_steps, size_step

        functions: dict[str, Callable[..., object]] = {
            "dense": release_steps.write_dense,
            "samples": sample_steps.write_samples,
            "size": size_step.write_size,
            "engine": release_steps.write_engines,
            "target-parity": release_steps.write_target_parity,
            "gate": release_steps.write_gate,
            "report": release_steps.write_report,
            "manifest": release_steps.write_release_manifest,
        }
        functions[name](dirs, *words)

    return run


def command_step(invocation: Invocation) -> Callable[[StageDirs], None]:
    """What a command does, run from the values that are printed; imported when it is called."""

    def run(dirs: StageDirs) -> None:
        from . import steps

        functions: dict[str, Callable[[StageDirs, Invocation], object]] = {
            "calibrate": steps.write_moments,
            "reduce": steps.write_reduced,
            "export": steps.write_graphs,
            "verify": steps.write_parity,
            "bench": steps.write_bench,
            "package": steps.write_package,
        }
        functions[invocation.command](dirs, invocation)

    return run


def heads_read(recipe: Recipe) -> dict[str, Path]:
    of_metrics = {f"parity.metric_files.{place}": path for place, path in enumerate(recipe.parity.metric_files)}
    return {f"parity.head.{place}": path for place, path in enumerate(recipe.parity.head)} | of_metrics
