"""Lengths of messages and assignment of work to ranks: plain arithmetic, without torch.

Every package may import it.
"""
