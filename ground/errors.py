"""What a caller may have to hear, and the exit code for each; light to import."""

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INCONCLUSIVE = 1, 2, 3
EXIT_MISSING, EXIT_NOT_COMPARABLE, EXIT_BUG, EXIT_INTERRUPTED = 4, 5, 70, 130
OUT_OF_MEMORY = ("out of memory", "failed to allocate memory", "can't allocate memory", "bad_alloc", "bad allocation")


class BadInput(ValueError):
    """The user's mistake: what is wrong, where, what was got and expected, what to do."""


class NotComparable(BadInput):
    """Two things that say nothing about one another: the message names what differs."""


class Missing(RuntimeError):
    """This machine lacks what the step needs; the message says what and how to get it."""


class RankLost(Missing):
    """Another process of a calibration over several has ended or can't be reached; nothing was written."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of any runtime says that memory ran out."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in OUT_OF_MEMORY)
