"""What the bits mean: specs, the one rounding file, packing, weight schemes, KV formats. Torch only."""
