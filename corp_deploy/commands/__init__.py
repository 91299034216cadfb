"""One file a command (or a family of them): read, call once, write."""
