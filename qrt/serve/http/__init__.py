"""HTTP for every dialect: connections, request bodies, errors, events, and responses of requests."""
