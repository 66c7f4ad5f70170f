"""More than a server can take."""
