"""Estimates before the work: memory, sizes, time and bits."""
