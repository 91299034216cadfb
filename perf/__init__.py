"""Measurement of models: runners, timing, statistics, parity, records, gates and reports."""
