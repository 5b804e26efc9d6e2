"""int8 K and V: 264 bytes per token and KV head at head_dim 128."""
