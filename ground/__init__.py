"""Errors, files, records, numbers and ports that all other packages use. Nothing here knows a model."""
