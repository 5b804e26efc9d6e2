"""The OpenAI-compatible server, tokenizer and detokenizer."""
