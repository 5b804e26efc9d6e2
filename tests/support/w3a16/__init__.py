"""A throw-away weight scheme: a folder of `qrt/quant/weight/` (tests/test_new_weight_scheme.py)."""
