"""Programs narrowed to what is kept of their sites, and the proof that they are the dense ones without the rest."""
