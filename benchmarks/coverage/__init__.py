"""Small instances of the architectures that people deploy, each taken through the whole chain."""
