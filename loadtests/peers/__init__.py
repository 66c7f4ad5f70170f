"""The same two models behind other servers, each set up as its own documentation advises."""
