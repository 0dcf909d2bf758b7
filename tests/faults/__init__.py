"""Faults at named points; `python -m tests.faults` prints the outcome of each."""
