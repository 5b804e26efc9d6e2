"""What LLM does beside generating text."""
