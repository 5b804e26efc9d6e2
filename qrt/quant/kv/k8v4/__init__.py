"""int8 K and int4 V: 200 bytes per token and KV head at head_dim 128."""
