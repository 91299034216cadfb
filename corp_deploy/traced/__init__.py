"""Sites found in a traced program, whatever its model is called, and the program narrowed to what is kept of them."""
