"""Cost of a step under each method: compute, bytes sent and memory."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from math import ceil, log2, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from thinwire.layout.message import HEADER_BYTES
from thinwire.layout.traffic import AGREEING_DELAY, Messages, ring_bytes, travels_checksummed
from thinwire.tools.compare.strategies import compression_of
from thinwire.tools.planning.network import Network
from thinwire.tools.planning.work import Shape, Workload
from thinwire.tools.run.config import PASS_S

if TYPE_CHECKING:
    from thinwire.local.config import LocalSGD
    from thinwire.strategy.distributed_strategy import DistributedStrategy

_VOTE_BYTES = 256
"""Of an agreement between two ranks, with what gloo and TCP add."""
DDP_BUCKETS = 4 * 2**20, 25 * 2**20
"""Gradient bytes of each bucket after a first one of 1 MiB: in `thinwire compare`, and in DDP."""
_AT_ONCE = 2
"""Collectives that gloo runs at a time, one for each of its threads."""
_ITERATED = 11
"""Copies of a matrix, about, while Muon updates it (`benchmarks.memory`)."""
_PROCESS_BYTES = 2**25
"""What a process has beside tensors: buffers of gloo, threads, what the allocator keeps."""
_FROZEN_BYTES = 2
"""Of a parameter that does not change: bfloat16."""
BRIEF = ("update", "exchange")
"""Parts of memory that are needed for a while, one after another."""
_MEAN_PASSES = 6
"""Passes over the numbers of a change that is averaged without compression."""
_MOST_OWNERS = 64
"""Largest number of ranks whose shares are counted one by one; beyond it they are extrapolated."""


class Cost(NamedTuple):
    """Mean cost of a step over a round: seconds, bytes sent by a rank, and memory in bytes: what
    the method keeps, and what an exchange needs for a while.
    """

    step_s: float
    bytes: float
    state_bytes: int
    exchange_bytes: int


class _Bucket(NamedTuple):
    """Ready time, encoding time and wire time of one bucket."""

    ready_s: float
    encode_s: float
    wire_s: float
    taken_s: float
    """Part of `wire_s` that occupies the wire; the rest is latency."""
    bytes: float


def cost_of(strategy: "DistributedStrategy", hook: str, work: Workload, network: Network) -> Cost:
    """Return the cost of a strategy, or of a hook of torch."""
    if strategy.localsgd is not None:
        return _local(strategy.localsgd, compression_of(strategy), work, network)
    if strategy.gradient_compression is not None:
        return _compressed(strategy.gradient_compression, work, network)
    if hook == "powersgd":
        return _powersgd(work, network)
    if hook == "fp16":
        return _reduced(work, network, width=2, passes=3)
    return _reduced(work, network, width=work.width, passes=1)


def memory_of(cost: Cost, work: Workload, optimizer: str | None) -> dict[str, int]:
    """Return the bytes of a process by what needs them, without activations."""
    # two moments with AdamW, one with Muon; the owner of a sharded matrix has it whole
    copies = _ITERATED if work.by_muon(optimizer) else 0
    return {
        "process": _PROCESS_BYTES,
        "weights and gradients": round(2 * work.width * work.numel) + _FROZEN_BYTES * work.frozen,
        "optimizer": round(work.width * (2 * work.numel - work.by_muon(optimizer))),
        "method": cost.state_bytes,
        "update": round(work.width * copies * work.muon_at_once),
        "exchange": cost.exchange_bytes,
    }


def _overlapped(
    work: Workload,
    buckets: Sequence[_Bucket],
    after_s: float,
    memory: tuple[int, int],
    sent: float,
) -> Cost:
    """Return the cost of a step whose buckets share one wire with the backward pass."""
    # begin(j) = max(free(j - 1), ready(j) + encode(1..j), end(i)), where i is the one before which
    # only one other is under way; free(j) = begin(j) + taken(j), end(j) = begin(j) + wire(j)
    free = encoded = 0.0
    ends = [0.0] * _AT_ONCE
    for bucket in buckets:
        encoded += bucket.encode_s
        begin_s = max(free, bucket.ready_s + encoded, min(ends))
        free = begin_s + bucket.taken_s
        ends[ends.index(min(ends))] = begin_s + bucket.wire_s
    step_s = max(*ends, work.step_s + encoded) + after_s
    return Cost(step_s, sum(bucket.bytes for bucket in buckets) + sent, *memory)


def _passes(work: Workload, numel: float, count: float) -> float:
    return numel * count * PASS_S[work.cuda]


def _reduced(work: Workload, network: Network, *, width: float, passes: float) -> Cost:
    """Return the cost under DDP: one all-reduce per bucket, at the better bucket size."""
    sent = ring_bytes(network.ranks, width * work.numel)
    costs = []

    @cache  # of layers that are alike
    def taken(numel: int) -> tuple[float, float, float, float]:
        nbytes = width * numel
        wire_s = network.all_reduce_s(nbytes)
        taken_s = network.transfer_s(ring_bytes(network.ranks, nbytes))
        return _passes(work, numel, passes), wire_s, taken_s, 0.0

    for bucket_bytes in DDP_BUCKETS:
        buckets = [
            _Bucket(ready_s, *taken(sum(map(prod, shapes))))
            for ready_s, shapes in work.buckets(2**20, bucket_bytes)
        ]
        copies = 0 if width == work.width else _AT_ONCE * bucket_bytes
        costs.append(_overlapped(work, buckets, 0.0, (0, copies), sent))
    return min(costs, key=lambda cost: cost.step_s)


def _powersgd(work: Workload, network: Network) -> Cost:
    """Return the cost of torch's PowerSGD hook, rank 2: one bucket, so after the backward pass."""
    from thinwire.compress.low_rank import LowRank

    factors, numel, others = _sent(LowRank(2, min_numel=1), work.shapes, network.ranks)
    sums = (*factors.sums, 4 * others)
    sent = Messages((), 0, tuple(round(work.width / 4 * nbytes) for nbytes in sums if nbytes))
    wire_s = _seconds(sent, network)
    bucket = _Bucket(work.step_s, _passes(work, numel, 9), wire_s, wire_s, _by_rank(sent, network))
    return _overlapped(work, [bucket], 0.0, (4 * numel + sum(factors.sums[1:]), 8 * numel), 0.0)


def _seconds(sent: Messages, network: Network, parts: int = 1, idle_s: float = 0.0) -> float:
    """Return the seconds of one of `parts` equal parts of messages."""
    found = sum(network.all_reduce_s(nbytes / parts, idle_s) for nbytes in sent.sums)
    if sent.to_owners:
        found += network.all_to_all_s(sum(sent.to_owners) / parts, idle_s)
        idle_s = 0.0
    if sent.to_all:
        found += network.all_gather_s(sent.to_all / parts, idle_s)
    return found


def _by_rank(sent: Messages, network: Network) -> int:
    """Return the bytes that a rank sends, each copy; a relay makes the copies itself."""
    if network.relay:
        return sent.to_all + sum(sent.sums)
    return sent.sent(0, network.ranks)


def _with_dense(sent: Messages, nbytes: int, ranks: int) -> Messages:
    """Return the same beside a dense sum, which is gathered if it is small."""
    if travels_checksummed(nbytes, ranks):
        return sent._replace(to_all=sent.to_all + nbytes)
    return sent._replace(sums=(*sent.sums, nbytes))


def _received(sent: Messages, ranks: int) -> int:
    """Return the bytes of all messages and means, with a rank's own."""
    return sum(sent.to_owners) + ranks * sent.to_all + sum(sent.sums)


@lru_cache(maxsize=4096)  # strategies share messages
def _sent(config: Any, shapes: Sequence[Shape], ranks: int) -> tuple[Messages, int, int]:
    """Return what a rank sends of the tensors that are compressed, once the messages have their
    final length; then the numbers of these tensors, and of all others.

    Of `to_owners` the first is the rank's own part, as 0, and the second that of all others.
    """
    import torch

    kinds = {s for s in {*shapes} if config.compresses(torch.empty(s, device="meta"))}
    taken = [torch.Size(s) for s in shapes if s in kinds]
    numel = sum(map(prod, taken))
    others = sum(map(prod, shapes)) - numel
    if not taken:
        return Messages((), 0), numel, others
    few = min(ranks, _MOST_OWNERS)
    step = config.settled_step
    found = config.messages(step, taken, few)
    first, row_bytes = found[:2]
    if not first:
        return found, numel, others
    # entries count for the source that moves most, whole tensors for the first one
    busiest = max(first) if few > 2 and config.unsent_share(step) else first[0]
    dealt = sum(first) - busiest
    if few < ranks:
        # for more ranks equal shares of what a few owners have, each message with its header
        row_bytes = HEADER_BYTES + ceil((row_bytes - HEADER_BYTES) * few / ranks)
        dealt += (ranks - few) * HEADER_BYTES
    return Messages((0, dealt), row_bytes), numel, others


def _compressed(config: Any, work: Workload, network: Network) -> Cost:
    """Return the cost of a step whose gradients are compressed."""
    node, sources = _nodes(config.node_size, network)
    buckets = []
    kept = 0
    rest = 0
    later = 0.0

    @cache  # of layers that are alike
    def found(shapes: tuple[Shape, ...]) -> tuple[int, int, float, _Bucket]:
        sent, numel, others = _sent(config, shapes, sources.ranks)
        inside = _inside(node, 4 * numel, _received(sent, sources.ranks))
        encode_s = _passes(work, numel, config.passes)
        return numel, others, sum(sent.sums[1:]), _bucket(0.0, encode_s, sent, inside, sources)

    for ready_s, shapes in work.buckets(*config.buckets):
        numel, others, sums, bucket = found(shapes)
        kept, rest, later = kept + numel, rest + others, later + sums
        if numel:
            buckets.append(bucket._replace(ready_s=ready_s))
    if rest:  # after the backward pass
        dense = _with_dense(Messages((), 0), 4 * rest, sources.ranks)
        inside = _inside(node, 4 * rest, 4 * rest)
        buckets.append(_bucket(work.step_s, 0.0, dense, inside, sources))
    # sums after the first need those of all, and leave together
    later_s = sources.all_reduce_s(later) if later else 0.0
    # the means, and what will be kept if all agree
    memory = 4 * kept, 4 * (work.numel + (kept if config.accumulates else 0))
    return _overlapped(work, buckets, later_s + _vote_s(network), memory, _vote_bytes(network))


def _nodes(node_size: int | None, network: Network) -> tuple[Network | None, Network]:
    """Return the network inside a node, None without nodes, and the network between sources."""
    node_size = node_size or network.node_size
    if node_size == 1:
        return None, network
    inside = network.node
    if node_size != network.node_size:
        inside = replace(network, ranks=node_size, node=None)
    return inside, replace(network, ranks=network.ranks // node_size, node=None)


def _inside(node: Network | None, nbytes: int, passed_on: float) -> tuple[float, float]:
    """Return seconds and bytes in a node: the mean first, in the end what came from others."""
    if node is None:
        return 0.0, 0.0
    inside_s = node.all_reduce_s(nbytes) + node.broadcast_s(passed_on)
    return inside_s, ring_bytes(node.ranks, nbytes) + passed_on


def _bucket(
    ready_s: float, encode_s: float, sent: Messages, inside: tuple[float, float], sources: Network
) -> _Bucket:
    """Return the cost of messages, and of their first sum, with seconds and bytes in a node."""
    begun = sent._replace(sums=sent.sums[:1])
    inside_s, inside_bytes = inside
    return _Bucket(
        ready_s,
        encode_s,
        _seconds(begun, sources) + inside_s,
        sources.transfer_s(_by_rank(begun, sources)) + inside_s,
        _by_rank(sent, sources) + inside_bytes,
    )


def _vote_bytes(network: Network) -> float:
    return (network.ranks - 1) * _VOTE_BYTES


@lru_cache(maxsize=16)
def _vote_s(network: Network) -> float:
    return network.all_to_all_s(_vote_bytes(network))


def _local(own: "LocalSGD", config: Any, work: Workload, network: Network) -> Cost:
    """Return the cost of local steps with one averaging, hidden by `delay` steps."""
    k, fragments, delay = own.k_steps, own.fragments, own.delay
    node, sources = _nodes(own.node_size or (1 if config is None else None), network)
    sent = Messages((), 0, (4 * work.numel,))
    passes = _MEAN_PASSES
    kept = 1
    brief = 0
    if config is not None:
        sent, _, rest = _sent(config, work.shapes, sources.ranks)
        sent = _with_dense(sent, 4 * rest, sources.ranks) if rest else sent
        passes = config.passes
        kept = 2
        # entries are chosen from the whole change, and so is a sum made
        brief = 4 * work.numel if sent.sums or config.unsent_share(config.settled_step) else 0
    wire_s = _seconds(sent, sources, fragments, k / fragments * work.step_s)
    nbytes: float = _by_rank(sent, sources)
    # with its own message once more
    held = _received(sent, sources.ranks + 1) + sum(sent.sums) + brief
    if node is not None:  # the mean over a node, and what its first rank passes on
        whole = 4 * work.numel / fragments
        wire_s += node.all_reduce_s(whole) + node.broadcast_s(nbytes / fragments)
        nbytes += ring_bytes(node.ranks, 4 * work.numel) + nbytes * ceil(log2(node.ranks))
    in_node_s = 0.0
    if node is not None and own.node_steps:
        between = 1 / own.node_steps - 1 / k  # means in a node, a step
        nbytes += k * between * ring_bytes(node.ranks, 4 * work.numel)
        in_node_s = between * node.all_reduce_s(4 * work.numel)
    agreeing = 1 if delay >= AGREEING_DELAY else 0
    exposed_s = max(0.0, wire_s - (delay - 2 * agreeing) * work.step_s)
    exposed_s += 2 * max(0.0, _vote_s(network) - agreeing * work.step_s)
    round_s = fragments * (exposed_s + _passes(work, work.numel / fragments, passes))
    voted = nbytes + fragments * _vote_bytes(network)
    kept += 1 if own.outer_momentum else 0
    held += 4 * work.numel if delay else 0  # steps go on beside what was measured
    step_s = work.step_s + round_s / k + in_node_s
    return Cost(step_s, voted / k, 4 * kept * work.numel, round(held / fragments))
