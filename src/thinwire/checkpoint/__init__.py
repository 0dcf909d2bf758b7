"""Checkpoints that survive a kill at any point and a change of ranks."""
