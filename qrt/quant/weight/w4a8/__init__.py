"""4-bit weights in progressive groups, 8-bit activations: an integer product of half the bytes."""
