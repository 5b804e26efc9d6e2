"""What quantization costs: perplexity, divergence, changed answers, tasks, and long contexts."""
