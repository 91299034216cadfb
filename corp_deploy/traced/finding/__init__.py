"""Sites found in a program by labels that flow through it, whatever its model is called."""
