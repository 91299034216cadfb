"""Programs: what models call of ATen, written down, and what can be told of them without knowing any site."""
