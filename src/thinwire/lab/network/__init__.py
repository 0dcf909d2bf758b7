"""Emulated links between workers: namespaces of the kernel, rate limits, delay."""
