"""Unquantized weights in the model dtype (fp16, bf16 or fp32)."""
