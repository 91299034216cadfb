"""Commands, in a file for each of them or for a family: read, call once, write."""
