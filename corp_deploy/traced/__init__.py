"""Any model, by its traced program: written down, its sites found, narrowed to what is kept of them."""
