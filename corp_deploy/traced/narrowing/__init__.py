"""Programs narrowed to the kept groups of their sites, and the proof that they equal the dense ones with zeros."""
