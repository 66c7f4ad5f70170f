"""Halftone: one PyTorch model served at several precisions, with the difference measured."""

__version__ = "0.1.0"
