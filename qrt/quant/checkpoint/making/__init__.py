"""A checkpoint folder in the making: its parts, its files, and the place where it appears."""
