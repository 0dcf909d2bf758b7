"""What training frameworks need beside the parts themselves; imports none of them."""

from thinwire.integrations.per_rank import PerRankState, Stateful

__all__ = ["PerRankState", "Stateful"]
