"""The click group of all commands, which turns errors into exit codes. Commands import heavy modules when they run."""

import errno
import traceback
from typing import Any

import click

from ground.errors import (
    EXIT_BAD_INPUT,
    EXIT_BUG,
    EXIT_MISSING,
    EXIT_NOT_COMPARABLE,
    BadInput,
    Missing,
    NotComparable,
    is_out_of_memory,
    os_error_from,
)
from ground.signals import describe_interruption, raising_on_signals
from ground.text import message_line

from .commands.calibrate import calibrate_command, inspect, merge_command, redundancy_command
from .commands.decoder import export_decoder_command, perplexity
from .commands.doctor import completion, demo, doctor, print_versions
from .commands.export import audit, build_command, export_command
from .commands.gate import gate_command, report_command
from .commands.package import lint_repo, package_command, serve_version_command
from .commands.reduce import latency_table, reduce_command
from .commands.release import check_command, release
from .commands.ship import ship
from .commands.sweep import sweep_command
from .commands.verify import bench_command, compare_command, verify_command


class Failure(click.ClickException):
    """An error that click prints as one line on stderr before it exits with `exit_code`."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message_line(message))
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it from the instance


WHAT_LACKS = {
    errno.ENOSPC: "the disk is full; free some space and run the command again",
    errno.EDQUOT: "your share of the disk is used up; free some space and run the command again",
    errno.EFBIG: "larger than a file may be here (ulimit -f, or the file system); write elsewhere or raise the limit",
    errno.EIO: "the disk failed (input/output error); look after it and run the command again",
    errno.EMFILE: "too many files are open for this process; raise ulimit -n and run the command again",
    errno.ENFILE: "too many files are open on this machine; run the command again when there are fewer",
}
"""Messages, by errno, for what the machine lacks; system errors not listed are about paths that the user gave."""


def _unforeseen(error: Exception) -> Failure:
    """Return the failure for an error of torch or the system, or for a bug, whose traceback is printed."""
    said = str(error)[:150]
    if is_out_of_memory(error):
        words = f"this machine has too little memory for that{f' ({said})' if said else ''}"
        return Failure(f"{words}; take a smaller batch or fewer images", EXIT_MISSING)
    if str(error).startswith("DataLoader worker"):  # raised anywhere, by torch's signal handler
        return Failure(
            f"a process that decodes images died ({said}): (a) memory ran out and the system killed it: "
            "take fewer --workers or a smaller batch, or (b) a library crashed on an image: --workers 0 shows on which",
            EXIT_MISSING,
        )
    of_system = os_error_from(error) or error
    if isinstance(of_system, OSError):
        where = f"{str(of_system.filename)[:500]}: " if of_system.filename else ""
        if of_system.errno in WHAT_LACKS:
            return Failure(f"{where}{WHAT_LACKS[of_system.errno]}", EXIT_MISSING)
        return Failure(f"{where}{of_system.strerror or of_system}", EXIT_BAD_INPUT)
    traceback.print_exception(error)
    return Failure("this is a bug in corp-deploy; the lines above say where", EXIT_BUG)


GROUPS: dict[str, tuple[click.Command, ...]] = {
    "Model": (inspect, redundancy_command, calibrate_command, merge_command),
    "Reduce": (reduce_command, sweep_command, latency_table),
    "Graph": (export_command, build_command, audit),
    "Proof": (verify_command, bench_command, compare_command, gate_command, report_command),
    "Release": (ship, release, check_command, package_command, lint_repo, serve_version_command),
    "Decoder": (perplexity, export_decoder_command),
    "Machine": (doctor, completion, demo),
}
"""The commands by topic; the help of a command lists the commands of two words that begin with its name."""


class Commands(click.Group):
    """A group that turns every error into one message and its exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in self.commands if " " not in name]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.list_commands(ctx)))
        for heading, commands in GROUPS.items():
            rows = [(str(each.name), each.get_short_help_str(200)) for each in commands if " " not in str(each.name)]
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command of two words, such as `bench compare`, before that of the first word alone.

        A second word that is a flag (`calibrate --merge`) may stand anywhere.
        """
        name, *words = args
        for place, word in enumerate(words):
            if f"{name} {word}" in self.commands and (not place or word.startswith("-")):
                name, words = f"{name} {word}", words[:place] + words[place + 1 :]
                break
        return super().resolve_command(ctx, [name, *words])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with raising_on_signals(click.exceptions.Exit):
                return super().invoke(ctx)
        except click.exceptions.Exit:
            raise
        except click.ClickException as error:
            error.message = message_line(error.message)  # type: ignore[misc]  # click shows the instance's own
            raise
        except NotComparable as error:
            raise Failure(str(error), EXIT_NOT_COMPARABLE) from error
        except BadInput as error:
            raise Failure(str(error), EXIT_BAD_INPUT) from error
        except Missing as error:
            raise Failure(str(error), EXIT_MISSING) from error
        except (KeyboardInterrupt, click.Abort) as error:
            raise Failure(*describe_interruption(error)) from error
        except Exception as error:
            raise _unforeseen(error) from error


SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(cls=Commands, context_settings=SETTINGS)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=print_versions,
    help="Show the versions that results depend on, and exit.",
)
def main() -> None:
    """Ship smaller vision transformers: calibrate, reduce, export, prove and measure.

    Exit codes: 0 done or passed, 1 parity or gate failed, 2 bad input, 3 inconclusive or nothing judged,
    4 this machine lacks something, 5 not comparable, 70 a bug, 130 interrupted, 143 terminated.
    """


for _command in (each for of_group in GROUPS.values() for each in of_group):
    _command.context_settings.update(SETTINGS)  # also for a command that is called without the group
    main.add_command(_command)
