"""Memory and start-up, against their bounds."""
