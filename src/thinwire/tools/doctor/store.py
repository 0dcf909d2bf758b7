"""What ranks tell each other through the store that torchrun has made, every wait bounded."""

import json
import time
from datetime import timedelta
from typing import Any, final

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

from thinwire._aside import within

__all__ = ["THREAD", "Board", "find_store"]

THREAD = "thinwire-doctor"
"""Name of the threads that wait for others."""

_CLOCK_ROUNDS = 4
_SHORTEST_S = 0.01


def find_store(rank: int, size: int, patience_s: float) -> Store:
    """The store that the environment names.

    Raises:
        Late, RuntimeError: It is not found.
        ValueError: The environment names none that can be.
    """
    limit = timedelta(seconds=patience_s)

    def find() -> Store:
        found: Store = next(iter(rendezvous("env://", rank, size, timeout=limit)))[0]
        return found

    return within(patience_s, find, name=THREAD)


@final
class Board:
    """Rows of JSON that ranks leave for each other in a store.

    Args:
        store: Which all of them have.
        rank: This one.
        size: Number of ranks.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._found = store
        self.store = PrefixStore("thinwire/doctor", store)

    def another(self) -> Store:
        """Another connection to the store, for work that may get stuck in it."""
        # torch has it, its stub not
        found: Store = self._found.clone()  # type: ignore[attr-defined]
        return found

    def tell(self, what: str, row: Any) -> None:
        """Leave a row for all."""
        self.store.set(f"{what}/{self.rank}", json.dumps(row))

    def hear(self, what: str, rank: int, until: float) -> Any:
        """The row of a rank; None where it has not come until then, by `time.monotonic`."""
        key = f"{what}/{rank}"
        left = timedelta(seconds=max(until - time.monotonic(), _SHORTEST_S))
        try:
            self.store.wait([key], left)
            return json.loads(self.store.get(key))
        except DistError:
            return None

    def hear_all(self, what: str, until: float) -> dict[int, Any]:
        """The rows of all ranks that have left one until then."""
        rows = {rank: self.hear(what, rank, until) for rank in range(self.size)}
        return {rank: row for rank, row in rows.items() if row is not None}

    def clock_skew(self, ranks: list[int], until: float) -> tuple[float, float] | None:
        """By how much this rank's clock is ahead of rank 0's, and how far off that may be, both in
        seconds; None where rank 0 did not answer. Collective over `ranks`.

        The middle of a round trip through the store is taken for the moment of rank 0's answer; the
        shortest of several trips counts.
        """
        best: tuple[float, float] | None = None
        for turn in range(_CLOCK_ROUNDS):
            if self.rank == 0:
                for other in ranks:
                    if other and self.hear(f"asked/{turn}", other, until) is not None:
                        self.store.set(f"time/{turn}/{other}/0", json.dumps(time.time()))
                continue
            begun = time.time()
            self.tell(f"asked/{turn}", True)
            theirs = self.hear(f"time/{turn}/{self.rank}", 0, until)
            ended = time.time()
            if theirs is None:
                return best
            if best is None or (ended - begun) / 2 < best[1]:
                best = (begun + ended) / 2 - theirs, (ended - begun) / 2
        return best or ((0.0, 0.0) if self.rank == 0 else None)
