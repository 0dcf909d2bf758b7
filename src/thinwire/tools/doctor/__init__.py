"""`thinwire doctor`: find network faults between machines before training.

It imports no other tool.
"""
