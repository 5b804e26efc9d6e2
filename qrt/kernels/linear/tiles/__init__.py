"""The products of weight-only codes in tiles (qrt/quant/weight/tiles.py)."""
