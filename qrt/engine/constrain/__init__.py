"""What answers must be like: grammars, and the end of thinking, from sampled tokens to masks. On the host."""
