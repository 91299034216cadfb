"""corp-deploy report."""

from pathlib import Path

import click

from corp_deploy.views.console import Output

from .command import command
from .options import DIRECTORY, FILE


@command()
@click.argument("directory", type=DIRECTORY)
@click.option("--output", "-o", type=FILE, required=True, help="Report to write: .html, .md, .csv, or .xml for JUnit.")
@click.option("--title", default=None, help="Its heading; default: the directory's name.")
def report(directory: Path, output: Path, title: str | None, out: Output) -> None:
    """Write the report of a directory's records. These are bench.json, parity.json, the records of the reduced model,
    and the effort records beside files.

    Example: corp-deploy report release -o release/report.html
    """
    from corp_deploy.proof.report_input import record_of_directory
    from corp_deploy.release.pace import efforts_in
    from corp_deploy.store.manifest import rows_of_efforts
    from ground.files import write_text
    from perf.report.render import csv, html, junit, markdown

    writers = {".html": html, ".md": markdown, ".csv": csv, ".xml": junit}
    if output.suffix not in writers:
        raise click.BadParameter(f"{output}: expected one of {', '.join(writers)}", param_hint="--output")
    record = record_of_directory(directory, title)
    if of_release := rows_of_efforts(efforts_in(directory)):
        record |= {"effort": of_release}
    write_text(output, writers[output.suffix](record))
    out.result({"report": str(output)}, f"{output}: written")
