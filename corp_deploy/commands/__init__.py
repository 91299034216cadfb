"""The click commands, in files by family: each reads inputs, calls one function and writes outputs."""
