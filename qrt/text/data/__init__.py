"""Data files of users: which are read, their rows, and the text of a row."""
