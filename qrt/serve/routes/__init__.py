"""The routes of the server, dialect by dialect, and the application that joins them."""
