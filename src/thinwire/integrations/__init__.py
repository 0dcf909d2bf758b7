"""Adapters for training frameworks. Users import them; no other package does."""

from thinwire.integrations.per_rank import EngineState, PerRankState, Stateful

__all__ = ["EngineState", "PerRankState", "Stateful"]
