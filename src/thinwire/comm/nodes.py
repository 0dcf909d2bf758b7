"""Ranks that share a node, taken together: only one of them speaks to other nodes."""

import os
import weakref
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from thinwire.comm.group import Group, Pending
from thinwire.comm.private import Private, is_alone
from thinwire.comm.sites import Replicas

__all__ = ["Nodes", "Sources", "job_ranks", "node_size_of", "require_divisor", "sources_of"]


class Nodes:
    """A group whose members are nodes of `node_size` consecutive ranks; `rank` and `size` count
    nodes.

    `all_gather`, `all_to_all` and `all_reduce_` have the meaning of `Group`'s: each node gives
    once, by its first rank, the leader, and every rank of every node gets the result. What the
    ranks of a node give must be the same bits on all of them.

    Attributes:
        all_ranks: All ranks.
        node: The ranks of this node.
        node_size: Ranks to a node, at least 2.
        rank: Number of this node, from 0.
        size: Nodes.
        leaders: The leaders of all nodes, where this rank is one of them.

    Communication: making the first one over a group is collective over it. A result is launched
    between the leaders at once; `wait` broadcasts it inside the node, so all ranks of a node must
    wait in the same order.
    Failure: as for `Group`; a leader that fails leaves, and its node with it.
    """

    proofs: None = None
    """Messages between nodes have none; see `Group.prove`."""

    def __init__(self, all_ranks: Group, node_size: int) -> None:
        self.all_ranks = all_ranks
        self.node_size = node_size
        self.rank, place = divmod(all_ranks.rank, node_size)
        self.size = all_ranks.size // node_size
        node, leaders = _groups_of(self)
        self.node = Group.over_private(node, all_ranks.timeout_s)
        self.leaders: Group | None = None
        if place == 0:
            self.leaders = Group.alone(all_ranks.timeout_s)
            if leaders is not None:
                self.leaders = Group.over_private(leaders, all_ranks.timeout_s)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank gave to exchanges of all kinds, inside its node too."""
        return self.all_ranks.bytes_sent + self.node.bytes_sent + self.bytes_between_nodes

    @property
    def bytes_received(self) -> int:
        """Bytes that came to this rank, from its node too."""
        between = 0 if self.leaders is None else self.leaders.bytes_received
        return self.all_ranks.bytes_received + self.node.bytes_received + between

    @property
    def wait_s(self) -> float:
        """Seconds for which this rank was blocked until an exchange was over, agreements
        included.
        """
        between = 0.0 if self.leaders is None else self.leaders.wait_s
        return self.all_ranks.wait_s + self.node.wait_s + between

    @property
    def rate_bit_s(self) -> float:
        """Of the line between the nodes; 0 where this rank is no leader."""
        return 0.0 if self.leaders is None else self.leaders.rate_bit_s

    @property
    def bytes_between_nodes(self) -> int:
        """Bytes that this rank gave to exchanges between the nodes, agreements aside; 0 where it is
        no leader.
        """
        return 0 if self.leaders is None else self.leaders.bytes_sent

    def abandon(self, reason: str) -> None:
        """See `Group.abandon`."""
        self.all_ranks.abandon(reason)
        self.node.abandon(reason)
        if self.leaders is not None:
            self.leaders.abandon(reason)

    def all_gather(self, message: Tensor, *, what: str) -> Pending[Tensor]:
        """See `Group.all_gather`: shape (size, B), row n from node n."""
        pending = None if self.leaders is None else self.leaders.all_gather(message, what=what)
        return self._shared(pending, lambda: message.new_empty((self.size, message.numel())), what)

    def all_to_all(self, parts: Tensor, lengths: Sequence[int], *, what: str) -> Pending[Tensor]:
        """See `Group.all_to_all`: shape (size, lengths[rank]), row n from node n."""
        pending = (
            None if self.leaders is None else self.leaders.all_to_all(parts, lengths, what=what)
        )
        return self._shared(pending, lambda: parts.new_empty((self.size, lengths[self.rank])), what)

    def all_reduce_(self, buffer: Tensor, *, what: str) -> Pending[Tensor]:
        """See `Group.all_reduce_`: the sum over the nodes; all ranks of one give the same."""
        pending = None if self.leaders is None else self.leaders.all_reduce_(buffer, what=what)
        return self._shared(pending, lambda: buffer, what)

    def _shared(
        self, pending: Pending[Tensor] | None, place: Callable[[], Tensor], what: str
    ) -> Pending[Tensor]:
        """Pass what the leader gets from other nodes on to all ranks of this node."""

        def finish() -> Tensor:
            result = place() if pending is None else pending.wait()
            return self.node.broadcast_(result, what=f"{what}, inside the node").wait()

        return Pending(finish)


Sources = Group | Nodes | Replicas
"""The sources of an exchange: ranks, nodes of ranks, or those that hold the same shard."""


def job_ranks() -> list[int]:
    """All ranks of this job, [0] without a process group; no communication."""
    joined = not is_alone()
    return list(range(dist.get_world_size())) if joined else [0]


def node_size_of(ranks: Sequence[int], node_size: int | None) -> tuple[int, str]:
    """Number of consecutive ranks of a group that share a node, and why, in words.

    Args:
        ranks: Those that exchange, as the whole job counts them, in the order of the group.
        node_size: What the user said; None to follow the launcher: `LOCAL_WORLD_SIZE`, where the
            group has at least two nodes and every one of them has that many of its ranks, else 1.

    Returns:
        A divisor of the group's size, and the reason.

    Raises:
        ValueError: `node_size` does not divide the size of the group.
    """
    if node_size is None:
        return _launched_size(ranks)
    require_divisor(node_size, len(ranks))
    return node_size, f"node_size={node_size} was given"


def require_divisor(node_size: int | None, ranks: int) -> None:
    """Raise `ValueError` where ranks do not fall into nodes of the size that was given."""
    if node_size is not None and ranks % node_size:
        raise ValueError(
            f"node_size={node_size} does not divide the {ranks} ranks that exchange: give a "
            f"divisor of {ranks}, or 1 to make every rank a source of its own"
        )


def sources_of(group: Group, node_size: int) -> Sources:
    """The group itself where every rank counts, else its nodes; collective over the group the first
    time.

    Raises:
        PeerLost, PeerStalled: A rank died or did not come while the process groups were made.
    """
    return group if node_size == 1 else Nodes(group, node_size)


def _launched_size(ranks: Sequence[int]) -> tuple[int, str]:
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not (said.isascii() and said.isdigit() and int(said) > 1):
        return 1, "LOCAL_WORLD_SIZE, which torchrun sets, names no second rank of a machine"
    local = int(said)
    if len(ranks) < 2 * local:
        return (
            1,
            f"the {len(ranks)} ranks do not fill two machines of LOCAL_WORLD_SIZE={local} ranks",
        )
    agents, job = os.environ.get("GROUP_WORLD_SIZE", ""), os.environ.get("WORLD_SIZE", "")
    if agents.isdigit() and job.isdigit() and int(agents) * local != int(job):
        return (
            1,
            f"the {agents} machines of this job do not all have LOCAL_WORLD_SIZE={local} ranks",
        )
    machines = [rank // local for rank in ranks]
    blocks = [set(machines[at : at + local]) for at in range(0, len(machines), local)]
    whole = len(machines) % local == 0 and all(len(block) == 1 for block in blocks)
    if not whole or len(set.union(*blocks)) < len(blocks):
        return (
            1,
            f"the ranks that exchange are not whole machines of LOCAL_WORLD_SIZE={local} "
            "consecutive ranks",
        )
    return local, f"LOCAL_WORLD_SIZE={local} and {len(blocks)} machines"


_Made = tuple[Private, Private | None]
_shared: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, _Made]]" = (
    weakref.WeakKeyDictionary()
)


def _groups_of(nodes: Nodes) -> _Made:
    """The process groups of this node and of the leaders, made once; the latter on leaders of
    several nodes.
    """
    all_ranks, width = nodes.all_ranks, nodes.node_size
    made = _shared.setdefault(all_ranks._private, {})
    if width not in made:
        ranks, first = all_ranks.global_ranks, nodes.rank * width
        node = Private(ranks[first : first + width], all_ranks.timeout_s)
        leads = nodes.size > 1 and all_ranks.rank == first
        made[width] = node, Private(ranks[::width], all_ranks.timeout_s) if leads else None
    return made[width]
