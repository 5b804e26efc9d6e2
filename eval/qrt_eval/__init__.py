"""qrt's evaluators: what quantization cost (perplexity) and what it bought (bytes, speed)."""
