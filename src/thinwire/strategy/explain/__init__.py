"""Describes a strategy in words: the order of a step, advice, and the effect on a model."""
