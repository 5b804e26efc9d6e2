"""Text and tokens: tokenizers, chat templates, tool calls, and the text of a running answer."""
