"""Local updates: ranks train independently and average every few steps."""
