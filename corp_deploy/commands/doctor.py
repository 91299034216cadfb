"""corp-deploy doctor."""

import click

from corp_deploy.views.console import Output

from .help import Above
from .options import output_options


@click.command(cls=Above)
@output_options
def doctor(out: Output) -> None:
    """Show what this machine has, and what it lacks.

    Example: corp-deploy doctor --json
    """
    from corp_deploy import machine
    from corp_deploy.views.console import machine_table

    record = machine.record()
    out.result(record, machine_table(record))
