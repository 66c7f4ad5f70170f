"""Steady load, and whether what a server's processes hold grows under it."""
