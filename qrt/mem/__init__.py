"""Token-granular KV memory: slots, prefix tree, manager (no torch); storage and sizing (torch)."""
