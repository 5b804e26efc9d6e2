"""The ranks of a model that several devices share: their processes, and the orders they get."""
