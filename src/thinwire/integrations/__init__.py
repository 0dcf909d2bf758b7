"""Adapters for training frameworks, which they do not import. Nothing here imports them."""

from thinwire.integrations.engine_state import EngineState
from thinwire.integrations.per_rank import PerRankState, Stateful

__all__ = ["EngineState", "PerRankState", "Stateful"]
