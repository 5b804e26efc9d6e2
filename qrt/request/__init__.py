"""What a request may ask for beside sampling: the shape of its answer, and its thinking."""
