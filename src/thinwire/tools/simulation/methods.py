"""What a source yields for a step or an averaging, as lengths: from the layouts that the messages
are made by.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.layout.fragments import partition
from thinwire.layout.message import SEAL_BYTES, SKETCH_NUMEL, Layout, Slot, WholeLayout, count_sent
from thinwire.layout.traffic import EXCHANGES, travels_sealed
from thinwire.tools.planning.methods import messages
from thinwire.tools.simulation.collectives import Collective, Deal, Gather, Reduce

__all__ = ["AGREEMENT", "Entries", "Method", "Whole", "dense_sum"]

AGREEMENT = Gather(24)
"""A vote in which all ranks say the same: length and digest of a report."""
Rounds = list[list[Collective]]


@dataclass(frozen=True)
class Entries:
    """The largest entries of each tensor, as `compress.entries` sends them.

    Attributes:
        sparsity: Fraction that is not sent.
        value_bits: What one value costs.
        exchange: "auto", "gather" or "split".
        sketch: Whether sums that stand for the change go beside it, as with `Sparse` at a decay.
    """

    sparsity: float
    value_bits: int
    exchange: str = "auto"
    sketch: bool = False

    def __post_init__(self) -> None:
        _require_exchange(self.exchange)

    def rounds(self, numels: Sequence[int], sources: int) -> Rounds:
        """One after the other, as `compress.entries.send_entries` yields them."""
        slots = tuple(Slot(numel, count_sent(numel, self.sparsity)) for numel in numels)
        return _rounds(Layout(slots, self.value_bits), self.exchange, sources)


@dataclass(frozen=True)
class Whole:
    """Every entry in a few bits, as `Quantized` sends them.

    Attributes:
        value_bits: What one entry costs.
        exchange: "auto", "gather" or "split".
        sketch: As in `Entries`; with `Quantized` at a decay below 1.
    """

    value_bits: int = 4
    exchange: str = "auto"
    sketch: bool = False

    def __post_init__(self) -> None:
        _require_exchange(self.exchange)

    def rounds(self, numels: Sequence[int], sources: int) -> Rounds:
        """One after the other, as `compress.quantized_change.Quantized` yields them."""
        return _rounds(WholeLayout(tuple(numels), self.value_bits), self.exchange, sources)


@dataclass(frozen=True)
class Method:
    """How ranks exchange: gradients after every step, or changes after several.

    Attributes:
        numels: Entries of each tensor, float32.
        compression: What is sent of them; None sends all.
        min_numel: Smaller tensors travel densely.
        node_size: Ranks that average densely first and count as one source.
        k_steps: Local steps between two averagings of the same tensor; 0 exchanges gradients.
        fragments: Parts that take turns in local updates.
        delay: Local steps that go on while an averaging is on its way.
    """

    numels: tuple[int, ...]
    compression: Entries | Whole | None = None
    min_numel: int = 1
    node_size: int = 1
    k_steps: int = 0
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        if self.node_size < 1:
            raise ValueError(f"node_size is {self.node_size}; it must be at least 1")
        if self.k_steps and not 0 <= self.delay < self.between:
            raise ValueError(
                f"delay={self.delay} must be below {self.between}, the steps between two averagings"
            )
        if self.delay and not self.k_steps:
            raise ValueError(f"delay={self.delay} needs k_steps: gradients are not exchanged late")

    @property
    def between(self) -> int:
        """Steps from one exchange to the next."""
        return max(1, self.k_steps // self.fragments)

    def parts(self) -> list[tuple[int, ...]]:
        """The tensors of each turn."""
        cuts = partition(self.numels, self.fragments)
        return [tuple(self.numels[i] for i in cut) for cut in cuts]

    def inside(self, numels: Sequence[int]) -> list[Collective]:
        """What the ranks of a node yield before, as `exchange.nodes.in_nodes` does."""
        if self.node_size == 1:
            return []
        words = sum(numels) + (SKETCH_NUMEL if self._sketched(numels) else 0)
        return [dense_sum(4 * words, self.node_size)]

    def rounds(self, numels: Sequence[int], sources: int) -> Rounds:
        """What a source yields for these tensors; all of a round is launched together."""
        mine = [] if self.compression is None else [n for n in numels if n >= self.min_numel]
        words = sum(numels) - sum(mine) + (SKETCH_NUMEL if self._sketched(numels) else 0)
        found: Rounds = []
        if mine:
            assert self.compression is not None, "something is compressed"
            found = self.compression.rounds(mine, sources)
        if words:
            found = found or [[]]
            found[0].append(dense_sum(4 * words, sources))
        return found

    def _sketched(self, numels: Sequence[int]) -> bool:
        return (
            self.compression is not None
            and self.compression.sketch
            and any(n >= self.min_numel for n in numels)
        )


def _rounds(layout: Layout | WholeLayout, exchange: str, sources: int) -> Rounds:
    first, row_bytes = messages(layout, exchange, sources)
    return [[Deal(first)], [Gather(row_bytes)]] if first else [[Gather(row_bytes)]]


def _require_exchange(exchange: str) -> None:
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange must be one of {EXCHANGES}, got {exchange!r}")


def dense_sum(nbytes: int, sources: int) -> Collective:
    """How a dense sum of so many bytes travels, as `compress.dense.sum_of` decides it."""
    if travels_sealed(nbytes, sources):
        return Gather(nbytes + SEAL_BYTES)
    return Reduce(nbytes)
