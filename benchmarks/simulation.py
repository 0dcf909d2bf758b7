"""Simulate steps of all ranks: compute, vote, exchange, vote."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from benchmarks.simulation_lines import (
    Broadcast,
    Collective,
    Deal,
    Gather,
    Jitter,
    Lines,
    Ranks,
    Reduce,
    Times,
    Vote,
    finished,
)
from thinwire.layout.message import CHECKSUM_BYTES, SKETCH_NUMEL, Layout, WholeLayout
from thinwire.layout.shares import contiguous
from thinwire.layout.traffic import AGREEING_DELAY, EXCHANGES, messages, travels_checksummed

AGREEMENT = Vote(24)
"""Vote of equal reports: length and digest."""
Rounds = list[list[Collective]]


@dataclass(frozen=True)
class Entries:
    """Largest entries of each tensor, as `compress.entries` sends them.

    Attributes:
        sparsity: Fraction that is not sent.
        value_bits: Bits per value.
        exchange: "auto", "gather" or "split".
        sketch: True if a sketch of the change is sent too, as with `Sparse` at a decay.
    """

    sparsity: float
    value_bits: int
    exchange: str = "auto"
    sketch: bool = False

    def layout(self, numels: Sequence[int]) -> Layout:
        """Return the layout of a message."""
        return Layout.of(numels, self.sparsity, self.value_bits)


@dataclass(frozen=True)
class Whole:
    """Every entry in a few bits, as `Quantized` sends them; fields as in `Entries`."""

    value_bits: int = 4
    exchange: str = "auto"
    sketch: bool = False

    def layout(self, numels: Sequence[int]) -> WholeLayout:
        """Return the layout of a message."""
        return WholeLayout(tuple(numels), self.value_bits)


@dataclass(frozen=True)
class Method:
    """Exchange method: gradients after every step, or changes after several.

    Attributes:
        numels: Entries of each tensor, float32.
        compression: Compression of them; None sends all.
        min_numel: Tensors below this size are sent densely.
        node_size: Ranks that average densely first and count as one source.
        k_steps: Local steps between two averagings of the same tensor; 0 exchanges gradients.
        fragments: Number of fragments of local updates.
        delay: Local steps made during an averaging.
    """

    numels: tuple[int, ...]
    compression: Entries | Whole | None = None
    min_numel: int = 1
    node_size: int = 1
    k_steps: int = 0
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        if self.compression is not None and self.compression.exchange not in EXCHANGES:
            raise ValueError(
                f"exchange must be one of {EXCHANGES}, got {self.compression.exchange!r}"
            )
        if self.node_size < 1:
            raise ValueError(f"node_size={self.node_size} must be at least 1")
        if self.k_steps and not 0 <= self.delay < self.between:
            raise ValueError(
                f"delay={self.delay} must be below {self.between}, the steps between two averagings"
            )
        if self.delay and not self.k_steps:
            raise ValueError(f"delay={self.delay} needs k_steps: gradients are not exchanged late")

    @property
    def between(self) -> int:
        """Number of steps from one exchange to the next."""
        return max(1, self.k_steps // self.fragments)

    @property
    def agreeing(self) -> int:
        """Number of local steps made during each of the two agreements of an averaging."""
        return 1 if self.delay >= AGREEING_DELAY else 0

    def parts(self) -> list[tuple[int, ...]]:
        """Return the tensors of each fragment."""
        cuts = contiguous(self.numels, self.fragments)
        return [tuple(self.numels[i] for i in cut) for cut in cuts]

    def inside(self, numels: Sequence[int]) -> list[Collective]:
        """Return the preceding collectives in a node, as `exchange.nodes.in_nodes` does."""
        if self.node_size == 1:
            return []
        words = sum(numels) + (SKETCH_NUMEL if self._sketched(numels) else 0)
        return [dense_sum(4 * words, self.node_size)]

    def rounds(self, numels: Sequence[int], sources: int) -> Rounds:
        """Return the collectives of a source for these tensors; a round is launched together."""
        large = [] if self.compression is None else [n for n in numels if n >= self.min_numel]
        words = sum(numels) - sum(large) + (SKETCH_NUMEL if self._sketched(numels) else 0)
        found: Rounds = []
        if large and self.compression is not None:
            layout, exchange = self.compression.layout(large), self.compression.exchange
            first, row_bytes, _ = messages(layout, exchange, sources)
            found = [[Deal(first)], [Gather(row_bytes)]] if first else [[Gather(row_bytes)]]
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


def dense_sum(nbytes: int, sources: int) -> Collective:
    """Return the collective of a dense sum of this size, chosen as in `compress.dense.sum_of`."""
    if travels_checksummed(nbytes, sources):
        return Gather(nbytes + CHECKSUM_BYTES)
    return Reduce(nbytes)


@dataclass(frozen=True)
class Trouble:
    """Faults of a run.

    Attributes:
        slow: Factor on the step time, by rank.
        slow_lines: Factor on the line's time, by rank.
        jitter_s: Mean extra latency of each message between neighbours.
        step_jitter: Relative standard deviation of the step time of each rank.
        lost: Step, from 1, at whose exchange a rank is missing, by rank.
        timeout_s: Time-out of one call.
        seed: Seed of the random numbers.
    """

    slow: Mapping[int, float] = field(default_factory=dict)
    slow_lines: Mapping[int, float] = field(default_factory=dict)
    jitter_s: float = 0.0
    step_jitter: float = 0.0
    lost: Mapping[int, int] = field(default_factory=dict)
    timeout_s: float = 1800.0
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run.

    Attributes:
        steps: Steps that all ranks made, with those after a last delay.
        seconds: Seconds until the last rank made them, or raised its error.
        sent: Bytes that each rank put on its line, as `stats()["bytes_sent"]` counts them, shape
            (W,).
        waited_s: Seconds that each rank waited for exchanges, shape (W,).
        error: Error that the remaining ranks raise; None for none.
    """

    steps: int
    seconds: float
    sent: Times
    waited_s: Times
    error: str | None = None

    @property
    def step_s(self) -> float:
        """Mean seconds of a step; the exchanges of a round are spread over its steps."""
        return self.seconds / max(1, self.steps)


def simulate(
    method: Method,
    lines: Lines,
    *,
    step_s: float,
    steps: int,
    trouble: Trouble | None = None,
    event_by_event: bool = False,
) -> Outcome:
    """Simulate steps on all ranks of a network.

    Args:
        method: Exchange method.
        lines: Network of the ranks.
        step_s: Seconds of a step without an exchange.
        steps: Number of steps, a multiple of `method.between`; the last one ends with an exchange.
        trouble: Injected faults.
        event_by_event: Simulate every event, even if a closed form is known.
    """
    if lines.ranks % method.node_size:
        raise ValueError(
            f"node_size={method.node_size} does not divide the {lines.ranks} ranks; give a divisor"
        )
    if steps < 1 or steps % method.between:
        raise ValueError(
            f"steps={steps} must be a multiple of {method.between}, the steps between exchanges"
        )
    if not 0 <= step_s < inf:
        raise ValueError(f"step_s must be at least 0 seconds, got {step_s:g}")
    trouble = trouble or Trouble()
    for name in ("slow", "slow_lines", "lost"):
        for rank in getattr(trouble, name):
            if not 0 <= rank < lines.ranks:
                raise ValueError(
                    f"{name} names rank {rank}, but the ranks are 0 to {lines.ranks - 1}"
                )
    for rank, times in [*trouble.slow.items(), *trouble.slow_lines.items()]:
        if not 0 < times < inf:
            raise ValueError(f"rank {rank} is slowed by {times:g}; the factor must be above 0")
    run = _Run(method, lines, step_s, trouble, event_by_event)
    parts, number = method.parts(), 0
    while run.steps < steps:
        run.compute(method.between)
        if not run.exchange(parts[number % len(parts)]):
            break
        number += 1
    return run.outcome()


class _Run:
    def __init__(
        self, method: Method, lines: Lines, step_s: float, trouble: Trouble, event_by_event: bool
    ) -> None:
        for rank, times in trouble.slow_lines.items():
            lines = lines.slowed(rank, times)
        self._method, self._lines, self._trouble = method, lines, trouble
        self._event_by_event = event_by_event
        self._random = np.random.default_rng(trouble.seed)
        self._jitter = Jitter(trouble.jitter_s, self._random)
        self._step_s = np.full(lines.ranks, step_s)
        for rank, times in trouble.slow.items():
            self._step_s[rank] *= times
        self._now = np.zeros(lines.ranks)
        self._waited = np.zeros(lines.ranks)
        self._sent = np.zeros(lines.ranks)
        self._error: str | None = None
        self._ahead = 0
        """Steps of the next round made during an exchange."""
        everyone = np.arange(lines.ranks, dtype=np.int64)
        self._all = everyone[None, :]
        self._nodes = everyone.reshape(-1, method.node_size)
        self._leaders = self._nodes[:, 0][None, :]
        self.steps = 0

    def outcome(self) -> Outcome:
        return Outcome(
            self.steps + self._ahead,
            float(self._now.max()),
            self._sent,
            self._waited,
            self._error,
        )

    def compute(self, steps: int) -> None:
        """Advance by steps without waiting."""
        self._now = self._now + self._computed(max(0, steps - self._ahead))
        self._ahead = 0
        self.steps += steps

    def _computed(self, steps: int) -> Times:
        taken = steps * self._step_s
        if self._trouble.step_jitter:
            spread = self._trouble.step_jitter * np.sqrt(steps)
            taken += self._step_s * spread * self._random.standard_normal(len(taken))
        made: Times = np.maximum(taken, 0.0)
        return made

    def exchange(self, numels: tuple[int, ...]) -> bool:
        """Run one exchange with its votes; return False if it failed."""
        method = self._method
        hidden = method.delay - 2 * method.agreeing
        idle_s = float((method.between - hidden) * self._step_s.min())
        if not self._agreed(method.agreeing):
            return False
        rounds, begin = method.rounds(numels, self._nodes.shape[0]), self._now
        for collective in method.inside(numels):
            self._now = self._over(collective, self._nodes, self._now)
        over = self._between(rounds[0], self._now, idle_s)
        self._waited += self._now - begin
        begin = self._step(hidden)
        self._wait_for(rounds[0], over)
        for later in rounds[1:]:  # launched when the first has come
            self._wait_for(later, self._between(later, self._now, 0.0))
        self._waited += self._now - begin
        self._ahead = method.delay
        return self._agreed(method.agreeing)

    def _step(self, steps: int) -> Times:
        """Make local steps during an exchange; return their end."""
        if steps:
            self._now = self._now + self._computed(steps)
        return self._now

    def _between(self, collectives: list[Collective], begin: Times, idle_s: float) -> list[Times]:
        """Return the end times of each collective between the sources, one after the other."""
        found = []
        for collective in collectives:
            begin = self._over(collective, self._leaders, begin, idle_s)
            found.append(begin)
            idle_s = 0.0
        return found

    def _wait_for(self, collectives: list[Collective], over: list[Times]) -> None:
        """Wait for the results, then send them on inside each node."""
        for collective, end in zip(collectives, over, strict=True):
            self._now = self._passed_on(collective, np.maximum(self._now, end))

    def _passed_on(self, collective: Collective, begin: Times) -> Times:
        nodes, size = self._nodes, self._nodes.shape[0]
        if self._method.node_size == 1:
            return begin
        results = _results(collective, size)
        self._sent[nodes] += np.outer(results, Broadcast(1).sent(nodes.shape[1]))
        return self._timed(Broadcast(int(results.max())), nodes, begin)

    def _over(
        self, collective: Collective, members: Ranks, begin: Times, idle_s: float = 0.0
    ) -> Times:
        """Return the end times by rank, and count bytes."""
        groups, size = members.shape
        self._sent[members.ravel()] += np.tile(np.rint(collective.sent(size)), groups)
        return self._timed(collective, members, begin, idle_s)

    def _timed(
        self, collective: Collective, members: Ranks, begin: Times, idle_s: float = 0.0
    ) -> Times:
        over = begin.copy()
        over[members] = finished(
            collective,
            self._lines,
            members,
            begin[members],
            jitter=self._jitter,
            idle_s=idle_s,
            event_by_event=self._event_by_event,
        )
        return over

    def _agreed(self, steps: int) -> bool:
        """Run a vote of all ranks during local steps, with the time-out as limit."""
        limit, begin = self._trouble.timeout_s, self._now
        lost = sorted(rank for rank, step in self._trouble.lost.items() if step <= self.steps)
        over = self._over(AGREEMENT, self._all, begin)
        waits = self._step(steps)
        if lost:
            self._failed(waits, lost, f"rank {_listed(lost)} did not join the exchange")
        elif float((over - waits).max()) > limit:
            late = np.flatnonzero(waits - waits.min() > limit).tolist()
            if late:
                self._failed(waits, late, f"rank {_listed(late)} was late for the exchange")
            else:
                self._failed(waits, [], "the agreement itself takes longer")
        else:
            self._now = np.maximum(waits, over)
            self._waited += self._now - waits
        return self._error is None

    def _failed(self, begin: Times, culprits: list[int], why: str) -> None:
        limit = self._trouble.timeout_s
        self._now = begin + limit
        self._now[culprits] = begin[culprits]
        self._error = f"step {self.steps}: after {limit:g} s all ranks raise: {why}"
        self.steps -= self._method.between


def _results(collective: Collective, sources: int) -> Ranks:
    """Return the bytes that each source receives from a collective."""
    if isinstance(collective, Gather):
        return np.full(sources, sources * collective.nbytes)
    if isinstance(collective, Deal):
        return sources * np.array(collective.lengths, np.int64)
    assert isinstance(collective, Reduce), "between sources"
    return np.full(sources, collective.nbytes)


def _listed(ranks: list[int]) -> str:
    """Format the first few ranks."""
    shown = ", ".join(map(str, ranks[:8]))
    return shown + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
