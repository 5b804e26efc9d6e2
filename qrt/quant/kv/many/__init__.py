"""Device code that formats share for writing many tokens at once."""
