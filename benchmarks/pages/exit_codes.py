"""The exit codes as a table, in the words of the code that gives them."""

import signal

from benchmarks.pages.markdown import table
from ground import errors

CODES = {
    0: ("done, or passed", "go on"),
    errors.EXIT_FAILED: ("parity or a gate's rule failed", "stop the release; the record says which link or rule"),
    errors.EXIT_BAD_INPUT: ("a mistake in what was given", "read the message: what, where, got, expected, what to do"),
    errors.EXIT_INCONCLUSIVE: (
        "inconclusive: a limit lies within the interval of a figure, or nothing had a limit to be judged by",
        "take more inputs or measure longer, as many as the message says, or give a limit",
    ),
    errors.EXIT_MISSING: ("this machine lacks something", "`corp-deploy doctor` says what and how to get it"),
    errors.EXIT_NOT_COMPARABLE: ("two records that say nothing of one another", "measure both on one machine"),
    errors.EXIT_BUG: ("a bug of ours, with a traceback", "report it"),
    errors.EXIT_INTERRUPTED: ("interrupted (Ctrl-C)", "the same command goes on"),
    128 + signal.SIGTERM: ("ended by SIGTERM", "the same command goes on"),
}


def exit_codes() -> str:
    """The table of exit codes."""
    return table(("code", "meaning", "what to do"), [(f"`{code}`", *words) for code, words in CODES.items()])
