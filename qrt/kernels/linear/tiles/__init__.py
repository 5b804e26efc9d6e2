"""The products of weight-only integers in tiles (qrt/quant/weight/tiles.py)."""
