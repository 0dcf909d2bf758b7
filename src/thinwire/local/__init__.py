"""Local updates: ranks train independently and average every few steps. `strategy` and
`integrations` import it.
"""
