"""Adapters for training frameworks; imports none of them."""

from thinwire.integrations.engine_state import EngineState
from thinwire.integrations.per_rank import PerRankState, Stateful

__all__ = ["EngineState", "PerRankState", "Stateful"]
