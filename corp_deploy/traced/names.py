"""Ops by their names in ATen."""


def named(words: str) -> frozenset[str]:
    """Names with spaces between them."""
    return frozenset(words.split())
