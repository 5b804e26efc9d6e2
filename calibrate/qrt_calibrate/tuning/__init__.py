"""Train codes, scales and norms of the whole model after its last layer is rounded (--tune)."""
