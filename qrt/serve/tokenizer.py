"""The old place of `qrt.text.tokenizer.Tokenizer`, for scripts that import it from here."""

from qrt.text.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
