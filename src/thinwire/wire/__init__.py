"""Bytes on the wire: messages, positions, values; no method and no rank."""
