"""corp-deploy doctor and corp-deploy doctor completion, and what --version prints."""

import click
from click.shell_completion import get_completion_class

from corp_deploy.views.console import Output

from .command import command

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

    record = machine.record()
    out.result(record, machine_table(record))


@command("doctor completion", epilog="Where it goes. " + ". ".join(SOURCES.values()) + ".")
@click.argument("shell", type=click.Choice(list(SOURCES)))
def completion(shell: str) -> None:
    """Print what completes commands and options in a shell.

    Example: corp-deploy doctor completion fish > ~/.config/fish/completions/corp-deploy.fish
    """
    script = get_completion_class(shell)
    assert script is not None, shell
    click.echo(
        script(click.get_current_context().find_root().command, {}, "corp-deploy", "_CORP_DEPLOY_COMPLETE").source()
    )


def print_versions(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """The versions that a result depends on, read from the packages' metadata without importing them."""
    if not value or ctx.resilient_parsing:
        return
    from corp_deploy.machine import versions

    click.echo("\n".join(f"{name} {version}" for name, version in versions().items()))
    ctx.exit()
