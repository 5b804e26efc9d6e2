"""Unquantized K and V, in the model's dtype (fp16, bf16 or fp32)."""
