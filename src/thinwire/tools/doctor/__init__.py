"""`thinwire doctor`: what goes wrong between machines, found before training; it imports no other
tool.
"""
