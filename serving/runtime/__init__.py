"""Halftone on Ray Serve: the deployments, and the local cluster they run in."""
