"""Tell a model's thinking from its answer, by the marks that it puts around it."""

from qrt.text.reasoning.formats import FORMATS, ReasoningFormat, reasoning_format
from qrt.text.reasoning.reading import Reasoning, ReasoningReader

__all__ = ["FORMATS", "Reasoning", "ReasoningFormat", "ReasoningReader", "reasoning_format"]
