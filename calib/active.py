"""The default threshold of active channels. Imports nothing heavy."""

ACTIVE_EPS = 1e-3
"""Magnitude above which an entry is active. The papers give none; one for each channel would need another pass."""
