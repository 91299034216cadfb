"""What a caller of this room may have to hear; light to import."""

import perf.errors


class BadInput(perf.errors.BadInput):
    """The user's mistake: what is wrong, where, what was got and expected, what to do.

    One of perf's, so that what reads a record for it passes this on as it is.
    """


class Missing(RuntimeError):
    """This machine lacks what the step needs; the message says what and how to get it."""
