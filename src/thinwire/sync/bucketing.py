"""Which tensors travel together, and when they may leave: the same buckets in the same order on all
ranks.
"""

from collections.abc import Iterator, Mapping, Sequence

__all__ = [
    "BUCKET_BYTES",
    "DENSE_BUCKET_BYTES",
    "FIRST_BUCKET_BYTES",
    "Readiness",
    "cut_into_buckets",
]

BUCKET_BYTES = 25 * 2**20
"""Gradient bytes of a bucket whose message is compressed: the fewer messages, the less each costs
in latency."""
DENSE_BUCKET_BYTES = 5 * 2**20
"""The same without compression: what the backward pass cannot hide is the last bucket; measured at
1 Gbit/s."""
FIRST_BUCKET_BYTES = 2**20
"""Of the bucket that is ready first: small, so that the link does not idle while the backward pass
begins."""


def cut_into_buckets(
    sizes: Mapping[str, int],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    first_bytes: int = FIRST_BUCKET_BYTES,
) -> list[list[str]]:
    """Tensors by bucket, in the reverse of the given order, which is about the order in which
    gradients come.

    A bucket ends with the tensor that fills it, as in DistributedDataParallel, so it may be larger
    by one tensor.

    Args:
        sizes: Bytes of every tensor by name, in the model's order.
        bucket_bytes: Size at which a bucket is full.
        first_bytes: The same for the first bucket, if that is smaller.
    """
    buckets: list[list[str]] = []
    room = 0
    for name, nbytes in reversed(list(sizes.items())):
        if room <= 0:
            room = bucket_bytes if buckets else min(first_bytes, bucket_bytes)
            buckets.append([])
        buckets[-1].append(name)
        room -= nbytes
    return buckets


class Readiness:
    """Turns "this tensor is ready" into "launch these buckets": each once, and none before those in
    front of it.

    Ranks become ready in different orders, and collectives must not; so a bucket that is complete
    waits for its turn.

    Args:
        buckets: The tensors of each bucket; no tensor twice.
    """

    def __init__(self, buckets: Sequence[Sequence[str]]) -> None:
        self._place = {name: place for place, names in enumerate(buckets) for name in names}
        self._sizes = [len(names) for names in buckets]
        self.restart()

    def restart(self) -> None:
        """Nothing is ready, nothing is launched."""
        self._missing = list(self._sizes)
        self._ready: set[str] = set()
        self._next = 0

    def mark(self, name: str) -> Iterator[int]:
        """Places of the buckets to launch now, in order; a tensor may be marked again, and an
        unknown one is nothing.

        A bucket counts as launched once its place is given.
        """
        if name in self._place and name not in self._ready:
            self._ready.add(name)
            self._missing[self._place[name]] -= 1
            while self._next < len(self._missing) and self._missing[self._next] == 0:
                self._next += 1
                yield self._next - 1

    def rest(self) -> Iterator[int]:
        """Places of all buckets that were not launched, in order."""
        while self._next < len(self._missing):
            self._next += 1
            yield self._next - 1
