"""A number as a person reads it: large ones without an exponent."""


def plain(value: float, digits: int) -> str:
    """Return the number with so many significant digits; a larger one as a whole number, such as 1,234,567."""
    shown = f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e+" in shown else shown
