"""Manage KV memory by single tokens: slots, prefix tree, manager (no torch); storage and sizing (torch)."""
