"""corp-deploy demo."""

from pathlib import Path

import click

from corp_deploy.views.console import Output

from .options import DIRECTORY, output_options


@click.command()
@click.option("--output", "-o", type=DIRECTORY, required=True, help="Directory for everything the demo makes.")
@click.option(
    "--example",
    type=click.Choice(["vit", "resnet"]),
    default="vit",
    show_default=True,
    help="The model: a vision transformer of 6 blocks or a ResNet of 6, both trained on the digits.",
)
@output_options
def demo(output: Path, example: str, out: Output) -> None:
    """Run the whole pipeline on a digits example, CPU only, in under three minutes.

    Example: corp-deploy demo -o demo-out
    """
    from corp_deploy.demo.example import EXAMPLES
    from corp_deploy.demo.run import STEPS, run_demo
    from corp_deploy.demo.table import demo_record, demo_tables

    with out.progress("demo", len(STEPS), unit="steps") as step:
        demo_run = run_demo(output, EXAMPLES[example], note=out.note, step=step)
    record = demo_record(demo_run)
    tables = demo_tables(record)
    out.result(record, *tables, f"parity {record['line']}", f"report: {output / 'report.html'}")
