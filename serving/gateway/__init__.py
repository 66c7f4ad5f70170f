"""The gateway's logic: a request in, a response out. Knows neither ray nor an HTTP server."""
