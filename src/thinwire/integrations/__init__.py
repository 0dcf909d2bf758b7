"""Adapters for training frameworks; imports none of them."""

from thinwire.integrations.per_rank import PerRankState, Stateful

__all__ = ["PerRankState", "Stateful"]
