"""What counts as an active channel where nobody says otherwise. Imports nothing heavy."""

ACTIVE_EPS = 1e-3
"""Magnitude that an entry has to be above: the papers give none, and one relative to a channel would need a pass."""
