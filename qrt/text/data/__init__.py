"""Read users' data files: find the files, read their rows, and turn a row into text."""
