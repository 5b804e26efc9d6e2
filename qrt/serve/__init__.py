"""The server: a package for each stage of a request's way from the command line to the engine.

    command/     `qrt-serve`: flags to settings
    processes/   the supervisor, and the engine process and API processes that it starts
    routes/      the application: a route checks a body, turns it into SamplingParams, and writes the reply
    http/        what all routes share: connections, bodies, errors, events, the service
    link/        messages to the engine and back; the router, which runs all clients' requests on one engine

A package imports those below it, never those above. `ray_serve` and `dynamo` are above all,
`settings` below all.
"""
