"""Grammars: the shape that an answer must have, as masks over the vocabulary. Needs llguidance, no torch."""
