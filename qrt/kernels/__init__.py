"""Operators, one folder each: `__init__` (contract, registration), `ref.py` (torch), `kernel.py` (Triton)."""
