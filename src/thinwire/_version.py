"""The version, read by the build and by the handshake of the ranks."""

__version__ = "0.4.0"
