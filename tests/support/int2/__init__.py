"""A throw-away KV format: what a folder in `qrt/quant/kv/` holds (tests/test_new_kv_format.py)."""
