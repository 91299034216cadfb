"""The function corp_deploy.report."""

from pathlib import Path

from corp_deploy.invocation.option import PathLike
from corp_deploy.views.report_files import write_report

from .in_python import errors_in_python


def report(
    directory: PathLike | None = None,
    *,
    output: PathLike,
    history: PathLike | None = None,
    title: str | None = None,
) -> Path:
    """Write the report of a directory's records, or of the releases in `history`, and return its path.

    The `directory` has bench.json or parity.json, such as that of a release. `history` is a directory in which
    `gate --history` and releases keep their records: the report shows time, throughput, energy, size and agreement of
    each release, and what differs where a figure changed. The suffix of `output` chooses the format: .html or .md, and
    for a directory also .csv or .xml (JUnit). `title` is the heading; default: the directory's name.

    Raises BadInput for both or neither of the directories, for one without records, and for another suffix.
    """
    with errors_in_python(parameters=("history", "output", "title")):
        below, over = (None if each is None else Path(each) for each in (directory, history))
        write_report(below, over, Path(output), title)
    return Path(output)
