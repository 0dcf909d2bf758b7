"""Sources of an exchange that are not single ranks: nodes, sites of sharded models, and pipelines.

A site holds a whole model in shards, a pipeline holds it in stages.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire.comm.group import Group, Pending, time_limit_s
from thinwire.comm.private import private_group, rank_and_size_in
from thinwire.comm.waiting import Timeout
from thinwire.errors import StrategyError, ThinwireError

DIMENSIONS = ("replicate", "shard")
"""Names of the dimensions of the mesh."""


def require_mesh(mesh: Any, **besides: object) -> None:
    """Raise unless it is a mesh of sites over all ranks, and nothing else chooses ranks."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__}: "
            'make it by init_device_mesh("cpu" or "cuda", (sites, shards), '
            'mesh_dim_names=("replicate", "shard"))'
        )
    if mesh.mesh_dim_names != DIMENSIONS:
        raise ValueError(
            f"mesh has the dimensions {mesh.mesh_dim_names}, and needs {DIMENSIONS}, in this "
            "order: sites first, then the shards inside each. A third dimension, as for tensor "
            "parallelism, is not supported"
        )
    ranks = sorted(mesh.mesh.flatten().tolist())
    if ranks != list(range(dist.get_world_size())):
        raise ValueError(
            f"mesh has the ranks {ranks}, and the job {dist.get_world_size()}: a mesh must have "
            "every rank of the job once"
        )
    for name, value in besides.items():
        if value is not None:
            raise ValueError(
                f"{name} and mesh were both given: the mesh says who exchanges, each rank its own "
                f"shards with those that hold the same; omit {name}"
            )


def sites_of(
    mesh: DeviceMesh,
    timeout: Timeout = None,
    streams: int | None = None,
) -> Group:
    """Return all ranks of this job, with `Group.shards` and `Group.replicas`."""
    # all ranks vote together: a bad message to one shard must stop all ranks
    require_mesh(mesh)
    job = Group(None, timeout, gloo=True)
    job.shards = Group(mesh.get_group("shard"), timeout)
    job.shards.one_site = True
    job.replicas = Group(mesh.get_group("replicate"), timeout, streams, gloo=True)
    shard_of = {rank: i for site in mesh.mesh.tolist() for i, rank in enumerate(site)}
    job.parts = [shard_of[rank] for rank in range(job.size)]
    return job


class Nodes:
    """Group whose members are nodes of consecutive ranks; `rank` and `size` count nodes."""

    # the first rank of a node sends for it: its ranks pass equal inputs and wait in the same order

    macs: None = None
    """None: messages between nodes have no MAC; see `Group.authenticate`."""
    relayed = False

    def __init__(self, all_ranks: Group, node_size: int) -> None:
        self.all_ranks = all_ranks
        self.node_size = node_size
        self.rank, index = divmod(all_ranks.rank, node_size)
        self.size = all_ranks.size // node_size
        ranks = all_ranks.global_ranks
        first = self.rank * node_size
        shared = all_ranks._shared
        parent = shared and shared.parent and shared.parent()
        assert shared is not None and isinstance(parent, dist.ProcessGroup), "it was made"
        name = f"{shared.name}, nodes of {node_size}"
        limit_s = all_ranks.timeout_s
        own = ranks[first : first + node_size]
        node = private_group(parent, f"{name}, {first}", limit_s, own)
        self.node = Group.over_private(node, limit_s)
        between = None
        if index == 0 and self.size > 1:
            # by gloo, unless the user named a group, whose backend counts
            gloo = parent is dist.group.WORLD
            own = ranks[::node_size]
            between = private_group(parent, f"{name}, leaders", limit_s, own, gloo=gloo)
        self.leaders = Group.over_private(between, limit_s)
        """The first ranks of all nodes; a group of one on a rank that leads none."""
        self.leaders.streams = all_ranks.streams

    @property
    def rate_bit_s(self) -> float:
        """Throughput between the nodes; 0 if this rank leads none."""
        return self.leaders.rate_bit_s

    def all_gather(self, message: Tensor, *, action: str) -> Pending[Tensor]:
        """Gather as `Group.all_gather` does: shape (size, B), row n from node n."""
        empty = partial(message.new_empty, (self.size, message.numel()))
        return self._shared(lambda group: group.all_gather(message, action=action), empty, action)

    def all_to_all(self, parts: Tensor, lengths: Sequence[int], *, action: str) -> Pending[Tensor]:
        """Exchange as `Group.all_to_all` does: shape (size, lengths[rank]), row n from node n."""
        empty = partial(parts.new_empty, (self.size, lengths[self.rank]))
        return self._shared(lambda g: g.all_to_all(parts, lengths, action=action), empty, action)

    def all_reduce_(self, buffer: Tensor, *, action: str) -> Pending[Tensor]:
        """Sum over the nodes as `Group.all_reduce_` does."""
        return self._shared(lambda g: g.all_reduce_(buffer, action=action), lambda: buffer, action)

    def _shared(
        self, launch: Callable[[Group], Pending[Tensor]], empty: Callable[[], Tensor], action: str
    ) -> Pending[Tensor]:
        """Launch on the leader, and broadcast its result to all ranks of this node."""
        pending = None if self.node.rank else launch(self.leaders)

        def finish() -> Tensor:
            result = empty() if pending is None else pending.wait()
            return self.node.broadcast_(result, action=f"{action}, inside the node").wait()

        return Pending(finish)


Sources = Group | Nodes
"""Sources of an exchange: ranks, or nodes of ranks. An exchange does not ask which."""


def node_size_of(ranks: Sequence[int], node_size: int | None) -> tuple[int, str]:
    """Return how many consecutive ranks of a group share a node, and the reason in words."""
    if node_size is not None:
        require_divisor(node_size, len(ranks))
        return node_size, f"node_size={node_size} was given"
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local_world_size.isdecimal() or int(local_world_size) < 2:
        return 1, "LOCAL_WORLD_SIZE, which torchrun sets, names no second rank of a machine"
    local = int(local_world_size)
    size = f"LOCAL_WORLD_SIZE={local}"
    if len(ranks) < 2 * local:
        return 1, f"the {len(ranks)} ranks do not fill two machines of {size} ranks"
    agents = os.environ.get("GROUP_WORLD_SIZE", "")
    job = os.environ.get("WORLD_SIZE", "")
    if agents.isdigit() and job.isdigit() and int(agents) * local != int(job):
        return 1, f"the {agents} machines of this job do not all have {size} ranks"
    machines = [rank // local for rank in ranks]
    blocks = [machines[at : at + local] for at in range(0, len(machines), local)]
    # each block is one machine, and no machine is in two
    firsts = dict.fromkeys(block[0] for block in blocks)
    if blocks != [[first] * local for first in firsts]:
        return 1, f"the ranks that exchange are not whole machines of {size} consecutive ranks"
    return local, f"{size} and {len(blocks)} machines"


def require_divisor(node_size: int | None, ranks: int) -> None:
    """Raise `ValueError` if the ranks do not divide into nodes of the given size."""
    if node_size and ranks % node_size:
        raise ValueError(
            f"node_size={node_size} does not divide the {ranks} ranks that exchange: give a "
            f"divisor of {ranks}, or 1 to make every rank a source of its own"
        )


def sources_of(group: Group, node_size: int) -> Sources:
    """Return the group itself if every rank is a source, else its nodes."""
    return group if node_size == 1 else Nodes(group, node_size)


class Grid:
    """Pipelines side by side."""

    # rank = replica * stages + stage. `peers` agree apart from the traffic of `stage_group`, `job`
    # on every update

    def __init__(self, stages: int, timeout: Timeout = None) -> None:
        rank, size = rank_and_size_in()
        if size % stages:
            fitting = sorted({stages * max(size // stages, 1), stages * (size // stages + 1)})
            raise StrategyError(
                f"a pipeline of {stages} stages needs a multiple of {stages} ranks, there are "
                f"{size}: start {' or '.join(map(str, fitting))} ranks, or change stages"
            )
        self.stages = stages
        self.replicas = size // stages
        self.replica, self.stage = divmod(rank, stages)
        world = dist.group.WORLD
        limit_s = time_limit_s(None, timeout)
        grid = f"{stages} stages, {limit_s} s"
        first = rank - self.stage
        ranks = {
            f"{grid}, replica {self.replica}": list(range(first, first + stages)),
            f"{grid}, stage {self.stage}": list(range(self.stage, size, stages)),
        }
        # torch makes the transfers between stages, so the backend must enforce the time-out
        self._groups = [
            Group.over_private(private_group(world, name, limit_s, own, timed=True), limit_s)
            for name, own in ranks.items()
            if world is not None
        ]
        self.peers = Group(self.stage_group, timeout)
        self.job = Group(None, timeout)
        self.job.replicas = Group(self.replica_group, timeout)
        self.job.parts = [rank % stages for rank in range(size)] if stages > 1 else ()

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """Ranks of this replica's pipeline in the order of the stages; None without ranks."""
        return self._groups[0]._private if self._groups else None

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold this stage in the order of the replicas; None without ranks."""
        return self._groups[1]._private if self._groups else None

    def transfer(
        self, leaving: Sequence[Tensor], to: int, arriving: Sequence[Tensor] = (), source: int = 0
    ) -> list[dist.Work]:
        """Start to send tensors to a stage of this replica, and to fill those of another one."""
        # both travel in one batch, which nccl needs
        group = self.stage_group
        assert group is not None, "there are several stages"
        transfers = [
            dist.P2POp(way, tensor, dist.get_global_rank(group, stage), group)
            for way, tensors, stage in ((dist.isend, leaving, to), (dist.irecv, arriving, source))
            for tensor in tensors
        ]
        works = dist.batch_isend_irecv(transfers) if transfers else []
        # gloo returns one work for each tensor, nccl one for the batch
        sent = max(len(works) - len(arriving), 0)
        for work in works[sent:]:
            work.wait()
        return works[:sent]

    def explain(self, error: RuntimeError, *, action: str) -> ThinwireError:
        """Return the error for a failed transfer between stages; ranks count within the replica."""
        return self.peers.explained(error, action, f"{self.peers.timeout_s:g} s")
