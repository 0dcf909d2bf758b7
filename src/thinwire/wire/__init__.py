"""Bytes on the wire: messages, positions, values. It knows no method and no rank; `compress` and
whoever reads messages import it.
"""
