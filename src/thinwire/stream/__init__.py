"""Versions of a model, published by one process and followed by others."""
