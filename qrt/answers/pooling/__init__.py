"""Prompts of models that pool, and what callers get of their vectors."""
