"""Traced models as people have them: their sites, what is told of them, and models narrower or with tokens merged."""
