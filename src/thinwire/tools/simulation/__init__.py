"""Simulate steps of up to thousands of ranks, in seconds and bytes, without torch.

No command imports it.
"""
