"""The flags of every command of qrt-eval; this folder imports nothing heavy."""
