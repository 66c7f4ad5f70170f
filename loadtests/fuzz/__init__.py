"""Requests that no careful client sends, and what the server makes of them."""
