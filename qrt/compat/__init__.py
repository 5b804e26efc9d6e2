"""Names of other engines: what qrt says to their settings, methods and request fields."""
