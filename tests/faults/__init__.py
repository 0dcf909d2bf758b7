"""Faults at named points, the table of which is in tests/faults/outcomes.md."""
