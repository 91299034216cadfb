"""Versions as numbers, to be compared."""


def version_numbers(version: str) -> tuple[int, ...]:
    """'11.4.0.106' -> (11, 4, 0, 106); what follows the first part that is no number is left out."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
