"""int4 K and V: 136 bytes per token and KV head at head_dim 128."""
