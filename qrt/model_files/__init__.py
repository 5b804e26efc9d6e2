"""The files of a model: which there are, and where they come from."""
