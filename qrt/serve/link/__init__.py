"""Connect the API to the engine: messages, sockets, the loop at each end, and the engine's metrics."""
