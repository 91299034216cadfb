"""What options, recipes and config.json say of a model, as plain values. Imports no torch."""
