"""Sites of a program, found by labels of elements that flow through its ops."""
