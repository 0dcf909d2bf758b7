"""Faults at named points, the table of which is in docs/reliability.md."""
