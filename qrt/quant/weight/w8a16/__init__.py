"""8-bit weights in groups, 16-bit activations."""
