"""What the bits mean: specs, rounding, packing, weight schemes and KV formats. Needs torch alone."""
