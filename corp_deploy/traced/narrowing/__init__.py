"""Programs narrowed to the kept groups of their sites, compared with dense ones whose removed elements are zeroed."""
