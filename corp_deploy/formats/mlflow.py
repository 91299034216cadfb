"""MLflow: a release as a run, with the recipe as parameters, figures as metrics, and the report as an artifact."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from corp_deploy.proof.gate import read_evidence
from corp_deploy.release.names import CARD, GATE, RECIPE, REPORTS
from ground.errors import BadInput, Missing
from ground.files import text_from_file
from perf.gate.verdicts import load_gate

from .figures import Figure, figures_of

MOST_PARAMETERS = 100  # in one call to a tracking server
LONGEST_VALUE = 6000
SUFFIXES = {"ms": "_ms", "bytes": "_bytes", "images/s": "_images_per_s"}


def log_release(directory: Path) -> str:
    """Log a release's directory to the active run, or to a new one, and return the run's id."""
    if not (directory / RECIPE).is_file():
        raise BadInput(f"{directory}: no {RECIPE} in it, expected the directory of a release")
    try:
        import mlflow
    except ImportError:
        raise Missing("the package mlflow is not installed: pip install 'corp-deploy[mlflow]'") from None
    recipe = tomllib.loads(text_from_file(directory / RECIPE))
    named, metrics = recipe["release"], dict(_metrics(directory))
    parameters = [*_parameters(recipe)]
    title = " ".join(filter(None, (named["name"], named.get("version"))))
    active = mlflow.active_run()
    with mlflow.start_run(run_name=title) if active is None else nullcontext(active) as run:
        for begin in range(0, len(parameters), MOST_PARAMETERS):
            mlflow.log_params(dict(parameters[begin : begin + MOST_PARAMETERS]))
        mlflow.log_metrics(metrics)
        mlflow.set_tags({f"corp_deploy.{key}": str(value) for key, value in named.items()})
        if (directory / GATE).is_file():
            mlflow.set_tag("corp_deploy.gate", load_gate(directory / GATE).verdict)
        for name in (*REPORTS, CARD, RECIPE):
            if (directory / name).is_file():
                mlflow.log_artifact(str(directory / name))
        return str(run.info.run_id)


def _parameters(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _parameters(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", str(value)[:LONGEST_VALUE]


def _metrics(directory: Path) -> Iterator[tuple[str, float]]:
    """Yield the figures of every record; those of a target's own record, such as bench.openvino.json, name it."""
    for kind in ("bench", "parity"):
        for path in filter(Path.is_file, (directory / f"{kind}.json", *sorted(directory.glob(f"{kind}.*.json")))):
            target = path.name.removeprefix(kind).removesuffix("json").strip(".")
            now = read_evidence(path, None) if kind == "bench" else read_evidence(None, path)
            yield from ((_metric_name(target, each), each.value) for each in figures_of(now))


def _metric_name(target: str, figure: Figure) -> str:
    """Return a name of letters that every MLflow store takes, such as `reduced.p50_ms.b8`."""
    measure = f"{figure.measure}{SUFFIXES.get(figure.unit, '')}"
    batch = None if figure.batch is None else f"b{figure.batch}"
    words: tuple[str | None, ...] = (target, figure.subject, figure.output, measure, batch)
    return re.sub(r"[^\w.-]+", "_", ".".join(filter(None, words)))
