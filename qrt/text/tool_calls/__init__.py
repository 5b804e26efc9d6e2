"""Tool calls in the notations of common chat templates: read from an answer, or forced by a grammar."""

from qrt.text.tool_calls.call import ToolCall
from qrt.text.tool_calls.channel_grammar import channel_grammar
from qrt.text.tool_calls.formats import FORMATS, LISTED, NO_NOTATION, ToolFormat, tool_format
from qrt.text.tool_calls.grammar import Callee, Calls, calls_grammar
from qrt.text.tool_calls.stream import MAX_CALLS, ToolCallStream

__all__ = [
    "FORMATS",
    "LISTED",
    "MAX_CALLS",
    "NO_NOTATION",
    "Calls",
    "Callee",
    "ToolCall",
    "ToolCallStream",
    "ToolFormat",
    "calls_grammar",
    "channel_grammar",
    "tool_format",
]
