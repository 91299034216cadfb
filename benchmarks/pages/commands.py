"""The commands as the reference shows them: what `--help` says, as Markdown, and a table of which page has which.

mkdocs-click would do, but prints `Sentinel.UNSET` for defaults of click 8.2 and newer.
"""

import re
import textwrap
from pathlib import Path

import click

from benchmarks.pages.markdown import table
from corp_deploy.cli import main
from corp_deploy.commands.help import Command, by_heading

PAGES = Path(__file__).resolve().parents[2] / "docs" / "reference" / "commands"
_SHOWN = re.compile(r"^<!-- made: command ([\w -]+) -->$", re.MULTILINE)
_LITERAL = re.compile(
    r"(?<![\w`-])(--[a-z][\w-]*|[\w./-]+\.(?:safetensors|onnx|plan|json|npy|npz|toml|html|pt2?|pth)\b)"
)


def pages_of_commands() -> dict[str, list[str]]:
    """The commands that each page shows, by its name."""
    return {page.name: _SHOWN.findall(page.read_text(encoding="utf-8")) for page in sorted(PAGES.glob("*.md"))}


def commands() -> str:
    """The table of all commands, in the order in which `corp-deploy --help` has them."""
    at = {command: page for page, shown in pages_of_commands().items() for command in shown}
    rows = [
        (f"[`{name}`]({at[name]}#{anchor(name)})", command.get_short_help_str(150))
        for name, command in main.commands.items()
    ]
    return table(("command", "what it does"), rows)


def anchor(name: str) -> str:
    """Of a command's section on its page."""
    return f"corp-deploy-{name}".replace(" --", "-").replace(" ", "-")


def _prose(text: str) -> str:
    """Words of a help text with options and files marked as such, and nothing else taken for Markdown."""
    escaped = text.replace("<", "&lt;").replace("*", "\\*").replace("|", "\\|")
    # What stands in backquotes in the help is marked already.
    return "".join(
        each if at % 2 else _LITERAL.sub(r"`\1`", each) for at, each in enumerate(re.split(r"(`[^`]*`)", escaped))
    )


def _paragraph(text: str) -> str:
    """A paragraph of a command's help; its example as a block."""
    words = " ".join(text.split())
    if words.startswith("Example: "):
        lines = textwrap.wrap(
            words.removeprefix("Example: "),
            90,
            break_long_words=False,
            break_on_hyphens=False,
            subsequent_indent="    ",
        )
        return "```sh\n" + " \\\n".join(lines) + "\n```"
    return _prose(words)


def command(name: str) -> str:
    """A command's section: what it does, an example, its arguments, and its options as a list: `--help` as Markdown."""
    shown = main.commands[name]
    assert isinstance(shown, Command), name
    context = click.Context(shown, info_name=f"corp-deploy {name}", **shown.context_settings)
    parts = [f"## corp-deploy {name}"]
    parts += map(_paragraph, (shown.help or "").split("\n\n"))
    parts.append("```text\n" + shown.get_usage(context).removeprefix("Usage: ") + "\n```")
    for heading, options in by_heading(shown.get_params(context)).items():
        parts += [f"**{heading}**"] * bool(shown.first)
        for record in filter(None, (option.get_help_record(context) for option in options)):
            spelled = ", ".join(f"`{each.strip()}`" for each in record[0].split(" / "))
            parts.append(f"{spelled}\n:   {_prose(record[1])}")
    return "\n\n".join(parts)
