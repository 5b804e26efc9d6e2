"""The command line of `qrt-serve`: its flags, its file of flags, and its entry point."""
