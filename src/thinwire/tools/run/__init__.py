"""Training on ranks of this machine: one strategy or script from its start to its result. `compare`
and `planning` import it.
"""
