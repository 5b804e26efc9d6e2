"""Evaluate what quantization costs (quality) and what it buys (bytes and speed)."""
