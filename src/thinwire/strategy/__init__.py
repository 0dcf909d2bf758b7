"""The one place that knows all methods: a strategy, its rules, and the engine that it prepares.
Only `integrations` and the command import it.
"""
