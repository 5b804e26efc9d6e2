"""Read tool calls from a model's answer, in the notations of common chat templates."""

from qrt.text.tool_calls.call import ToolCall
from qrt.text.tool_calls.formats import FORMATS, ToolFormat, tool_format
from qrt.text.tool_calls.stream import MAX_CALLS, ToolCallStream

__all__ = ["FORMATS", "MAX_CALLS", "ToolCall", "ToolCallStream", "ToolFormat", "tool_format"]
