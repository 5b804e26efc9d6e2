"""The server's processes: the engine, the API servers, and the supervisor that starts and watches them."""
