"""Programs (graphs of a model's ATen calls): tracing, rewriting, running, and analyses that need no sites."""
