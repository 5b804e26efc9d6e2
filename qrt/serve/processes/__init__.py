"""The server's processes: the engine, the API processes, and the supervisor that starts and watches them."""
