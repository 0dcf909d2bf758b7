"""Strategies: the fields, the rules that combine them, and the engine that `prepare` makes. Only
`integrations` and the command import this package.
"""
