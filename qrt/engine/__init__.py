"""The engine: token ids in, token ids out. `schedule/` plans steps on the host, `step/` runs them."""
