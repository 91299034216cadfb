"""What a caller of this room may have to hear; light to import."""


class BadInput(ValueError):
    """The user's mistake: what is wrong, where, what was got and expected, what to do."""


class RankLost(RuntimeError):
    """Another process of a calibration over several has ended or can't be reached; nothing was written."""
