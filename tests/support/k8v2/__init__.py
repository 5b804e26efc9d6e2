"""A throw-away KV format of two widths, on a CPU alone (tests/test_new_kv_format.py)."""
