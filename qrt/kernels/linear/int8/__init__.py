"""The products of int8 codes by int8 codes."""
