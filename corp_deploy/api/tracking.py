"""The function corp_deploy.log_to_mlflow."""

from pathlib import Path

from corp_deploy.formats.mlflow import log_release
from corp_deploy.invocation.option import PathLike


def log_to_mlflow(release: PathLike) -> str:
    """Log a release to MLflow: its recipe as parameters, its figures as metrics, its reports as artifacts.

    `release` is what `ship` returned, or the directory of a release. It goes to the active run, or to a new run with
    the release's name and version, in the tracking store and the experiment that MLflow is set to. Metrics have the
    batch size in their names, such as `reduced.p50_ms.b8`, and the gate's verdict is the tag `corp_deploy.gate`.

    Returns the run's id. Raises BadInput for a directory that is no release, and Missing without the package of the
    extra `mlflow`.
    """
    return log_release(Path(release))
