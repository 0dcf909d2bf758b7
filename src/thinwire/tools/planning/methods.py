"""Cost of a step under each method: compute, bytes sent and memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, log2, prod
from typing import Any

from thinwire.layout.message import HEADER_BYTES, Layout, WholeLayout, factor_numels
from thinwire.layout.traffic import (
    AGREEING_DELAY,
    BUCKETS,
    TWO_ROUND_BUCKETS,
    messages,
    ring_bytes,
    travels_checksummed,
)
from thinwire.tools.planning.network import Network
from thinwire.tools.planning.work import Workload
from thinwire.tools.run.config import PASS_S

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
BRIEF = ("update", "exchange")
"""Parts of memory that are needed for a while, one after another."""
_MOST_OWNERS = 64
"""Largest number of ranks whose shares are counted one by one; beyond it they are extrapolated."""


@dataclass(frozen=True)
class Cost:
    """Mean cost of a step over a round: seconds, bytes sent by a rank, and memory in bytes: what
    the method keeps, and what an exchange needs for a while.
    """

    step_s: float
    bytes: float
    state_bytes: int
    exchange_bytes: int


@dataclass(frozen=True)
class _Bucket:
    """Ready time, encoding time and wire time of one bucket."""

    ready_s: float
    encode_s: float
    wire_s: float
    taken_s: float
    """Part of `wire_s` that occupies the wire; the rest is latency."""
    bytes: float


def cost_of(document: Mapping[str, Any], hook: str, work: Workload, network: Network) -> Cost:
    """Return the cost of a strategy."""
    if "localsgd" in document:
        return _local(document["localsgd"], work, network)
    if "dgc" in document:
        return _dgc(document["dgc"], work, network)
    if "low_rank" in document:
        return _low_rank(document["low_rank"], work, network)
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
        "weights and gradients": round(2 * work.width * work.numel),
        "optimizer": round(work.width * (2 * work.numel - work.by_muon(optimizer))),
        "method": cost.state_bytes,
        "update": round(work.width * copies * max(work.numels)),
        "exchange": cost.exchange_bytes,
    }


def _overlapped(
    work: Workload,
    buckets: Sequence[_Bucket],
    after_s: float,
    memory: tuple[int, int],
    sent: float = 0.0,
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
    for bucket_bytes in DDP_BUCKETS:
        buckets = []
        for ready_s, shapes in work.buckets(2**20, bucket_bytes):
            numel = sum(map(prod, shapes))
            wire_s = network.all_reduce_s(width * numel)
            taken_s = network.transfer_s(ring_bytes(network.ranks, width * numel))
            buckets.append(_Bucket(ready_s, _passes(work, numel, passes), wire_s, taken_s, 0.0))
        copies = 0 if width == work.width else _AT_ONCE * bucket_bytes
        costs.append(_overlapped(work, buckets, 0.0, (0, copies), sent))
    return min(costs, key=lambda cost: cost.step_s)


def _powersgd(work: Workload, network: Network) -> Cost:
    """Return the cost of torch's PowerSGD hook, rank 2: one bucket, so after the backward pass."""
    rank, left, right, rest, kept = 2, 0, 0, 0, 0
    for shape in work.shapes:
        numel = prod(shape)
        rows, columns = factor_numels(shape, rank)
        if len(shape) > 1 and (rows + columns) * 2 < numel:
            left, right, kept = left + rows, right + columns, kept + numel
        else:
            rest += numel
    sent = work.width * (left + right + rest)
    wire_s = sum(network.all_reduce_s(work.width * n) for n in (left, right, rest) if n)
    encode_s = _passes(work, kept, 9)
    bucket = _Bucket(work.step_s, encode_s, wire_s, wire_s, ring_bytes(network.ranks, sent))
    return _overlapped(work, [bucket], 0.0, (4 * (kept + right), 8 * kept))


def _low_rank(own: Mapping[str, Any], work: Workload, network: Network) -> Cost:
    rank, least = own.get("rank", 2), own.get("min_numel", 16384)
    buckets, kept, rest, all_right = [], 0, 0, 0
    for ready_s, shapes in work.buckets(*TWO_ROUND_BUCKETS):
        large = [shape for shape in shapes if len(shape) > 1 and prod(shape) >= least]
        numel = sum(map(prod, large))
        factors = [factor_numels(shape, rank) for shape in large]
        left, right = (4 * sum(pair[i] for pair in factors) for i in (0, 1))
        rest += sum(map(prod, shapes)) - numel
        kept += numel
        all_right += right
        if left:
            sent = ring_bytes(network.ranks, left + right)
            taken_s = network.transfer_s(ring_bytes(network.ranks, left))
            encode_s = _passes(work, numel, 12)
            buckets.append(_Bucket(ready_s, encode_s, network.all_reduce_s(left), taken_s, sent))
    # the right factors need the left ones of all, and leave together
    right_s = network.all_reduce_s(all_right) if all_right else 0.0
    rest_of_it, after_s = _end_of_step(4 * rest, work, network, None, network)
    memory = 4 * kept, 4 * work.numel  # the means lie beside the gradients
    sent = _vote_bytes(network)
    return _overlapped(work, [*buckets, *rest_of_it], right_s + after_s, memory, sent)


def _dgc(own: Mapping[str, Any], work: Workload, network: Network) -> Cost:
    sparsity, bits = own.get("sparsity", 0.999), own.get("value_bits", 32)
    if not isinstance(sparsity, float):
        sparsity = sparsity[-1]
    least = own.get("min_numel", 16384)
    node, sources = _nodes(own, network)
    buckets, kept, rest = [], 0, 0
    for ready_s, shapes in work.buckets(*BUCKETS):
        large = [n for n in map(prod, shapes) if n >= least]
        rest += sum(map(prod, shapes)) - sum(large)
        kept += sum(large)
        if not large:
            continue
        exchange = own.get("exchange", "auto")
        dealt = _dealt(_layout_of(tuple(large), sparsity, bits), exchange, sources.ranks)
        encode_s = _passes(work, sum(large), 10)
        wire_s, nbytes = dealt.seconds(sources), dealt.sent(sources)
        taken_s = sources.transfer_s(nbytes)
        if node is not None:
            # the mean of the gradients first, and in the end what came from other nodes
            passed_on = sources.ranks * (dealt.row_bytes + dealt.first_bytes / sources.ranks)
            inside_s = node.all_reduce_s(4 * sum(large)) + node.broadcast_s(passed_on)
            wire_s, taken_s = wire_s + inside_s, taken_s + inside_s
            nbytes += ring_bytes(node.ranks, 4 * sum(large)) + passed_on
        buckets.append(_Bucket(ready_s, encode_s, wire_s, taken_s, nbytes))
    rest_of_it, after_s = _end_of_step(4 * rest, work, network, node, sources)
    # the means, and what will be kept if all agree
    memory = 4 * kept, 4 * (work.numel + kept)
    return _overlapped(work, [*buckets, *rest_of_it], after_s, memory, _vote_bytes(network))


def _nodes(
    own: Mapping[str, Any], network: Network, *, by_itself: bool = True
) -> tuple[Network | None, Network]:
    """Return the network inside a node, None without nodes, and the network between sources."""
    node_size = own.get("node_size") or (network.node_size if by_itself else 1)
    if node_size == 1:
        return None, network
    inside = network.node
    if node_size != network.node_size:
        inside = replace(network, ranks=node_size, node=None)
    return inside, replace(network, ranks=network.ranks // node_size, node=None)


@dataclass(frozen=True)
class _Dealt:
    """One rank's part in an exchange: an all-to-all to owners, then a ring."""

    first_bytes: float
    """Bytes to all owners together; 0 if messages are gathered."""
    row_bytes: float
    """Bytes that each rank forwards for every other rank."""

    def seconds(self, network: Network, parts: int = 1, idle_s: float = 0.0) -> float:
        """Return the seconds of one of `parts` equal parts."""
        return _dealt_s(self.first_bytes / parts, self.row_bytes / parts, network, idle_s)

    def sent(self, network: Network) -> float:
        """Return the bytes that a rank sends."""
        return self.first_bytes + (1 if network.relay else network.ranks - 1) * self.row_bytes


@lru_cache(maxsize=4096)  # strategies share messages
def _dealt_s(first_bytes: float, row_bytes: float, network: Network, idle_s: float) -> float:
    first_s = network.all_to_all_s(first_bytes, idle_s) if first_bytes else 0.0
    return first_s + network.all_gather_s(row_bytes, 0.0 if first_bytes else idle_s)


_layout_of = lru_cache(maxsize=1024)(Layout.of)


@lru_cache(maxsize=1024)
def _dealt(layout: Layout | WholeLayout, exchange: str, ranks: int) -> _Dealt:
    few = min(ranks, _MOST_OWNERS)
    first, row_bytes = messages(layout, exchange, few)
    if not first:
        return _Dealt(0, row_bytes)
    # entries count for the source that moves most, whole tensors for the first one
    busiest = first[0] if few == 2 or isinstance(layout, WholeLayout) else max(first)
    dealt = sum(first) - busiest
    if few == ranks:
        return _Dealt(dealt, row_bytes)
    # for more ranks equal shares of what a few owners have, each message with its header
    share = HEADER_BYTES + (row_bytes - HEADER_BYTES) * few / ranks
    return _Dealt(dealt + (ranks - few) * HEADER_BYTES, share)


def _end_of_step(
    dense_bytes: float, work: Workload, network: Network, node: Network | None, sources: Network
) -> tuple[list[_Bucket], float]:
    """Return the cost of dense tensors after the backward pass, and seconds of the vote."""
    if network.ranks == 1:
        return [], 0.0
    found = []
    if dense_bytes:
        if travels_checksummed(round(dense_bytes), sources.ranks):
            sent = (sources.ranks - 1) * dense_bytes
            wire_s = sources.all_gather_s(dense_bytes)
        else:
            sent, wire_s = ring_bytes(sources.ranks, dense_bytes), sources.all_reduce_s(dense_bytes)
        taken_s = sources.transfer_s(sent)
        if node is not None:
            inside_s = node.all_reduce_s(dense_bytes) + node.broadcast_s(dense_bytes)
            wire_s, taken_s = wire_s + inside_s, taken_s + inside_s
            sent += ring_bytes(node.ranks, dense_bytes) + dense_bytes
        found.append(_Bucket(work.step_s, 0.0, wire_s, taken_s, sent))
    return found, _vote_s(network)


def _vote_bytes(network: Network) -> float:
    return (network.ranks - 1) * _VOTE_BYTES


@lru_cache(maxsize=16)
def _vote_s(network: Network) -> float:
    return network.all_to_all_s(_vote_bytes(network))


def _local(own: Mapping[str, Any], work: Workload, network: Network) -> Cost:
    """Return the cost of local steps with one averaging, hidden by `delay` steps."""
    k, fragments, delay = own["k_steps"], own.get("fragments", 1), own.get("delay", 0)
    compression = own.get("compression") or {}
    node, sources = _nodes(own, network, by_itself=bool(compression))
    wire_s, nbytes, passes, kept, brief = _change(
        compression, work, sources, fragments, k / fragments * work.step_s
    )
    if node is not None:  # the mean over a node, and what its first rank passes on
        whole = 4 * work.numel / fragments
        wire_s += node.all_reduce_s(whole) + node.broadcast_s(nbytes / fragments)
        nbytes += ring_bytes(node.ranks, 4 * work.numel) + nbytes * ceil(log2(node.ranks))
    agreeing = 1 if delay >= AGREEING_DELAY else 0
    exposed_s = max(0.0, wire_s - (delay - 2 * agreeing) * work.step_s)
    exposed_s += 2 * max(0.0, _vote_s(network) - agreeing * work.step_s)
    round_s = fragments * (exposed_s + _passes(work, work.numel / fragments, passes))
    sent = nbytes + fragments * _vote_bytes(network)
    kept += 1 if own.get("outer_momentum") else 0
    brief += 4 * work.numel if delay else 0  # steps go on beside what was measured
    return Cost(
        work.step_s + round_s / k, sent / k, 4 * kept * work.numel, round(brief / fragments)
    )


def _change(
    compression: Mapping[str, Any], work: Workload, network: Network, fragments: int, idle_s: float
) -> tuple[float, float, int, int, float]:
    """Return seconds per fragment, bytes of a change, passes over it, words kept per number, and
    bytes needed for a while.
    """
    if "quantized" in compression or "sparse" in compression:
        ((tag, own),) = compression.items()
        if tag == "quantized":
            layout: Layout | WholeLayout = WholeLayout(work.numels, own.get("value_bits", 4))
            passes, whole = 16, 0
        else:  # entries are chosen from the whole change
            layout = _layout_of(work.numels, own["sparsity"], own.get("value_bits", 2))
            passes, whole = 14, 4 * work.numel
        dealt = _dealt(layout, own.get("exchange", "auto"), network.ranks)
        # a rank has its own message and all others
        held = dealt.first_bytes + (network.ranks + 1) * dealt.row_bytes + whole
        seconds = dealt.seconds(network, fragments, idle_s)
        return seconds, dealt.sent(network), passes, 2, held
    nbytes = 4 * work.numel
    wire_s = network.all_reduce_s(nbytes / fragments, idle_s)
    # what is sent, and the mean
    sent_bytes = nbytes if network.relay else ring_bytes(network.ranks, nbytes)
    return wire_s, sent_bytes, 6, 1, 2 * nbytes
