"""Offer `qrt.text.tokenizer.Tokenizer` under its old path, for scripts that import it from here."""

from qrt.text.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
