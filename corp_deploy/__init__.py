"""corp-deploy: ship smaller vision transformers. Importing this package imports neither torch nor timm.

Its functions are those behind the commands: `load` a model, `calibrate` it, `reduce` it, `export` the result, `verify`
that its outputs agree, `bench` it against the dense one, or `ship` it, which does all of this; `sites` names the places
of a module that can be reduced, `report` writes reports, and `log_to_mlflow` logs a release.
These names stay stable; everything else is internal and may change.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ground.errors import BadInput, Missing, NotComparable

if TYPE_CHECKING:
    from .api.calibration import Calibration, calibrate
    from .api.collecting import Collector, merge_moments
    from .api.graphs import Graph, export
    from .api.models import Source, load, sites
    from .api.proof import verify
    from .api.reduction import Reduced, ReduceOptions, reduce
    from .api.release import Release, ship
    from .api.reports import report
    from .api.speed import Speed, bench
    from .api.tracking import log_to_mlflow

__version__ = "0.1.0"

__all__ = [
    "BadInput",
    "Calibration",
    "Collector",
    "Graph",
    "Missing",
    "NotComparable",
    "ReduceOptions",
    "Reduced",
    "Release",
    "Source",
    "Speed",
    "bench",
    "calibrate",
    "export",
    "load",
    "log_to_mlflow",
    "merge_moments",
    "reduce",
    "report",
    "ship",
    "sites",
    "verify",
]

_HOMES = {
    "calibration": ("Calibration", "calibrate"),
    "collecting": ("Collector", "merge_moments"),
    "graphs": ("Graph", "export"),
    "models": ("Source", "load", "sites"),
    "proof": ("verify",),
    "reduction": ("ReduceOptions", "Reduced", "reduce"),
    "release": ("Release", "ship"),
    "reports": ("report",),
    "speed": ("Speed", "bench"),
    "tracking": ("log_to_mlflow",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a public name that needs torch on its first use (PEP 562)."""
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f".api.{_HOME_OF[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
