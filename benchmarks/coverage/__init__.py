"""Small instances of deployed architectures, and their chain from sites to engines."""
