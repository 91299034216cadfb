"""Traced models: what they offer to reduction, facts that no program tells, narrower models and merged tokens."""
