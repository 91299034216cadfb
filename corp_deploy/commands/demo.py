"""corp-deploy demo."""

from pathlib import Path

import click

from corp_deploy.views.console import Output

from .command import command
from .options import DIRECTORY


@command()
@click.option("--output", "-o", type=DIRECTORY, required=True, help="Directory for everything the demo makes.")
@click.option(
    "--example",
    type=click.Choice(["vit", "resnet"]),
    default="vit",
    show_default=True,
    help="The model: a vision transformer of 6 blocks or a ResNet of 6, both trained on the digits.",
)
@click.option("--inputs-only", is_flag=True, help="Write the example's model and images, to start from, and no more.")
def demo(output: Path, example: str, inputs_only: bool, out: Output) -> None:
    """Run every step on digits, without a GPU, in three minutes.

    Example: corp-deploy demo -o demo-out
    """
    from corp_deploy.demo.example import EXAMPLES
    from corp_deploy.demo.run import STEPS, run_demo, write_inputs
    from corp_deploy.demo.table import demo_record, demo_tables

    if inputs_only:
        write_inputs(output, EXAMPLES[example])
        files = {"model": str(output / "dense"), "images": str(output / "images")}
        return out.result(files, f"model: {files['model']}, images: {files['images']}")
    with out.progress("demo", len(STEPS), unit="steps") as step:
        demo_run = run_demo(output, EXAMPLES[example], note=out.note, step=step)
    record = demo_record(demo_run)
    tables = demo_tables(record)
    out.result(record, *tables, f"parity {record['line']}", f"report: {output / 'report.html'}")
