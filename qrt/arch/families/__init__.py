"""The families: a function each from the entries of config.json to an `Arch`, saying what differs."""
