"""Emulated links between ranks: namespaces, rate limits, delay; it imports no other tool."""
