"""Plain values with which options, recipes and config.json describe a model. Imports no torch."""
