"""Every reader of foreign files against files of chance: what it says is an answer or BadInput, soon, and no more."""
