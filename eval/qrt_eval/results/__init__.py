"""How results are kept and shown: JSON files of one schema, and tables on stdout."""
