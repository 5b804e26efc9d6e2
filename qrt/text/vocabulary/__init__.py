"""Vocabulary files that qrt turns into a tokenizer itself."""
