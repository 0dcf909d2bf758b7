"""What looks across tensors must look across the stages of a pipeline: gradients that are not
finite.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from thinwire.comm import Group
from thinwire.compress.dense import all_finite
from thinwire.exchange.vote import Drops, Report, agree_on_step
from thinwire.strategy.exchanges import Exchange, Grads

__all__ = ["DropTogether"]


class DropTogether:
    """An exchange among the replicas of one stage, after all stages have agreed that their
    gradients are finite.

    Communication: 24 bytes a rank and update over all ranks.
    """

    local = False

    def __init__(self, inner: Exchange, all_ranks: Group, names: Sequence[str]) -> None:
        self._inner, self._all_ranks, self._names = inner, all_ranks, list(names)
        self._drops = Drops()

    @property
    def moved(self) -> bool:
        return self._inner.moved

    @property
    def bytes_sent(self) -> int:
        return self._inner.bytes_sent + self._all_ranks.bytes_sent

    @property
    def wait_s(self) -> float:
        return self._inner.wait_s + self._all_ranks.wait_s

    def counts(self, step: int) -> dict[str, float]:
        """As of the exchange inside, and what the agreement of all stages adds."""
        counts, votes = self._inner.counts(step), self._all_ranks
        besides: dict[str, float] = {
            "bytes_received": votes.bytes_received,
            "bytes_between_nodes": votes.bytes_sent,
        }
        return {key: value + besides.get(key, 0) for key, value in counts.items()}

    @property
    def dropped_steps(self) -> int:
        return self._drops.total

    @property
    def k_steps(self) -> int:
        return self._inner.k_steps

    @property
    def pending(self) -> str:
        return self._inner.pending

    def update(self, step: int, grads: Grads) -> bool:
        bad = next((name for name, grad in grads.items() if not all_finite(grad)), None)
        report = Report(
            step, "all stages", non_finite=None if bad is None else self._names.index(bad)
        )
        reports = agree_on_step(self._all_ranks, report, [])
        return not self._drops.needed(reports, self._names) and self._inner.update(step, grads)

    def observe(self, loss: Tensor) -> None:
        self._inner.observe(loss)

    def skip(self) -> None:
        self._inner.skip()

    def require_equal(self, step: int) -> None:
        self._inner.require_equal(step)

    def flush(self) -> None:
        self._inner.flush()

    def state_dict(self) -> dict[str, Any]:
        return {
            "inner": self._inner.state_dict(),
            "dropped": self._drops.total,
            "in a row": self._drops.in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state["inner"])
        self._drops.total, self._drops.in_a_row = state["dropped"], state["in a row"]

    def buffers_loaded(self) -> None:
        self._inner.buffers_loaded()

    def start_anew(self) -> None:
        self._inner.start_anew()

    def close(self) -> None:
        self._inner.close()
