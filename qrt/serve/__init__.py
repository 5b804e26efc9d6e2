"""The server: a room for each step of a request's way from the command line to the engine.

    command/     `qrt-serve`: flags to settings
    processes/   the supervisor, and the engine process and API processes that it starts
    routes/      the application: a route checks a body, makes SamplingParams of it, and writes the reply
    http/        what all routes share: connections, bodies, errors, events, the service
    link/        messages to the engine and back; the router, which runs all clients' requests on one engine

A room imports those below it, never those above. `ray_serve` stands above all; `settings` below all.
"""
