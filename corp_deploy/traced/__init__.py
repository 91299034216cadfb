"""Traced programs of any model: recording, finding of sites, narrowing, and the models built on them."""
