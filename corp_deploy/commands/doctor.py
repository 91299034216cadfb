"""The commands doctor, doctor completion and demo, and the option --version."""

from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class
from rich.table import Table

from corp_deploy.views.console import Output

from .command import command
from .options import DIRECTORY

SOURCES = {
    "bash": 'bash: eval "$(corp-deploy doctor completion bash)" in ~/.bashrc',
    "zsh": 'zsh: eval "$(corp-deploy doctor completion zsh)" in ~/.zshrc',
    "fish": "fish: corp-deploy doctor completion fish > ~/.config/fish/completions/corp-deploy.fish",
}


@command()
def doctor(out: Output) -> None:
    """Show what this machine has, and what it lacks.

    Example: corp-deploy doctor --json
    """
    from corp_deploy import machine
    from corp_deploy.views.console import machine_table

    record = machine.build_record()
    out.result(record, machine_table(record))


@command("doctor completion", epilog="How to use it. " + ". ".join(SOURCES.values()) + ".")
@click.argument("shell", type=click.Choice(list(SOURCES)))
def completion(shell: str) -> None:
    """Print the script that completes commands and options in a shell.

    Example: corp-deploy doctor completion fish > ~/.config/fish/completions/corp-deploy.fish
    """
    script = get_completion_class(shell)
    assert script is not None, shell
    click.echo(
        script(click.get_current_context().find_root().command, {}, "corp-deploy", "_CORP_DEPLOY_COMPLETE").source()
    )


def print_versions(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Print the versions that results depend on, read from the packages' metadata, and exit, if --version is given."""
    if not value or ctx.resilient_parsing:
        return
    from corp_deploy.machine import versions

    click.echo("\n".join(f"{name} {version}" for name, version in versions().items()))
    ctx.exit()


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
    from corp_deploy.demo.run import EXAMPLES, STEPS, run_demo, write_inputs

    if inputs_only:
        write_inputs(output, EXAMPLES[example])
        files = {"model": str(output / "dense"), "images": str(output / "images")}
        return out.result(files, f"model: {files['model']}, images: {files['images']}")
    with out.progress("demo", len(STEPS), unit="steps") as step:
        record = run_demo(output, EXAMPLES[example], note=out.note, step=step)
    out.result(record, *_tables(record), f"parity {record['line']}", f"report: {output / 'report.html'}")


EFFECTS = {"none": "without repair (none)", "grail": "repaired as GRAIL does (grail)", "best": "repaired (best)"}


def _tables(record: dict[str, Any]) -> tuple[Table, Table]:
    table = Table("", "dense", "reduced", "change")

    def compare(name: str, dense: float, reduced: float, form: str, *, change: bool = True) -> None:
        table.add_row(name, f"{dense:{form}}", f"{reduced:{form}}", f"{reduced / dense - 1:+.1%}" if change else "")

    dense, reduced = record["models"]["dense"], record["models"]["reduced"]
    compare("parameters", dense["parameters"], reduced["parameters"], ",")
    compare("MACs per image", dense["macs"], reduced["macs"], ",")
    compare("accuracy, held out", dense["accuracy"], reduced["accuracy"], ".1%", change=False)
    compare("top-1 agreement", dense["agreement"], reduced["agreement"], ".1%", change=False)
    for row in record["speed"]:
        one, other, batch = row["dense"], row["reduced"], row["batch"]
        for key, name, form in (
            ("p50_ms", f"p50, batch {batch} (ms)", ".2f"),
            ("images_per_s", f"images/s, batch {batch}", ",.0f"),
        ):
            if one[key] is not None and other[key] is not None:
                compare(name, one[key], other[key], form)
            else:
                table.add_row(name, one["status"], other["status"], "")
    repair = Table("same widths", "relative logit error", "agreement", "accuracy")
    for effect in record["effects"]:
        figures = f"{effect['relative_error']:.4f}", f"{effect['agreement']:.1%}", f"{effect['accuracy']:.1%}"
        repair.add_row(EFFECTS[effect["preset"]], *figures)
    return table, repair
