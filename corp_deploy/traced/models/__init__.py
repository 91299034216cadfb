"""Traced models: their sites, segments and facts, narrowed models, and models that merge tokens."""
