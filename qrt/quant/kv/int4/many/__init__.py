"""int4 for many tokens at once."""
