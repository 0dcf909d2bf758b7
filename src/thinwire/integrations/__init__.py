"""Adapters for training frameworks, which user code imports, and nothing here."""

from thinwire.integrations.per_rank import EngineState, PerRankState, Stateful

__all__ = ["EngineState", "PerRankState", "Stateful"]
