"""Measurement: runners, timing, statistics, parity, records and reports."""
