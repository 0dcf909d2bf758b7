"""Stages of a model on different ranks. `strategy` imports this package."""
