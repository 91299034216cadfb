"""Help of commands with many options: --help explains about ten of them, and --help-all all."""

from collections.abc import Iterable, Mapping, Sequence
from inspect import cleandoc
from textwrap import fill
from typing import Any

import click

GENERAL = "General"


class Headed(click.Option):
    """A click option with the heading that help shows it under."""

    def __init__(self, *args: Any, heading: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading or GENERAL


def _show_all(context: click.Context, _: click.Parameter, requested: bool) -> None:
    if requested and not context.resilient_parsing:
        context.meta[__name__] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_all,
    help="Show all options, by topic, and exit.",
)


class Command(click.Command):
    """A click command whose --help explains the options `first`, in that order, and whose --help-all explains all.

    Without `first` there is no --help-all, and --help explains all. Help also lists the two-word commands that begin
    with the command's name (`bench compare` for `bench`). The command exits with the code that its function returns.
    """

    def __init__(self, *args: Any, first: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.first = first.split()

    def invoke(self, ctx: click.Context) -> None:
        if code := super().invoke(ctx):
            ctx.exit(code)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        group = ctx.parent and ctx.parent.command
        every = group.commands.items() if isinstance(group, click.Group) else ()
        below = [(name, each.get_short_help_str(200)) for name, each in every if name.startswith(f"{ctx.info_name} ")]
        _write(formatter, "See also", below)
        super().format_epilog(ctx, formatter)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *[HELP_ALL] * bool(self.first)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; if --model is missing, suggest it for a model that was given as an argument."""
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as missing:
            left = self.make_parser(ctx).parse_args(typed)[1]
            if not left or missing.param is None or missing.param.opts != ["--model"]:
                raise
            raise click.UsageError(f"Missing option '--model'; did you mean --model {left[0]}?", ctx) from None

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first paragraph, the example and the exit codes; with --help-all or without `first`, all text."""
        if __name__ in ctx.meta or not self.first:
            return super().format_help_text(ctx, formatter)
        first, *others = cleandoc(self.help or "").split("\n\n")
        for text in (first, *(each for each in others if each.startswith(("Example:", "Exit codes:")))):
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write(_filled(formatter, text.split()))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not self.first:
            return super().format_options(ctx, formatter)
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        by_name = {each.opts[0]: each for each in options}
        first = [*(by_name[f"--{name}"] for name in self.first), *options[-2:]]
        if __name__ in ctx.meta:
            for heading, each in by_heading(options).items():
                _write(formatter, heading, [option.get_help_record(ctx) for option in each])
        else:
            _write(formatter, "Options", [option.get_help_record(ctx) for option in first])
            with formatter.section("More options (--help-all says what they do)"):
                for heading, each in by_heading(each for each in options if each not in first).items():
                    words = [f"{heading}:", *(option.opts[0] for option in each)]
                    formatter.write(_filled(formatter, words, hanging="  "))


def by_heading(parameters: Iterable[click.Parameter]) -> Mapping[str, Sequence[click.Option]]:
    found: dict[str, list[click.Option]] = {}
    for each in parameters:
        if isinstance(each, click.Option):
            found.setdefault(each.heading if isinstance(each, Headed) else GENERAL, []).append(each)
    return found


def _filled(formatter: click.HelpFormatter, words: Sequence[str], hanging: str = "") -> str:
    indent = formatter.current_indent * " "
    text, own = indent + " ".join(words), indent + hanging
    return fill(text, formatter.width, subsequent_indent=own, break_on_hyphens=False) + "\n"


def _write(formatter: click.HelpFormatter, heading: str, rows: list[Any]) -> None:
    if rows:
        with formatter.section(heading):
            formatter.write_dl(rows)
