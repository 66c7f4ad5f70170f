"""Metrics: one injected registry per process, and one merged page for all processes."""
