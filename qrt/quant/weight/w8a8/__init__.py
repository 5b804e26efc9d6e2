"""8-bit weights, 8-bit activations: an integer product."""
