"""Converting a module to a precision, and proving with arithmetic what it computes in."""
