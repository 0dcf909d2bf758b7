"""Sites side by side, each with a whole model in shards: who exchanges what with whom."""

import datetime
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire.comm.group import Group, Pending
from thinwire.comm.proofs import Proofs

__all__ = ["DIMENSIONS", "Replicas", "Sites", "require_mesh"]

DIMENSIONS = ("replicate", "shard")
"""What the dimensions of the mesh are called."""


def require_mesh(mesh: Any, **besides: object) -> None:
    """Refuse what is no mesh of sites over all ranks of this job, and what else says who exchanges.

    Args:
        mesh: What the user gave.
        besides: By name, what may not be given with a mesh; None where it was not.

    Raises:
        TypeError: It is none.
        ValueError: Its dimensions have other names, it leaves ranks out, or something of `besides`
            was given.
    """
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
                f"shards with those that hold the same; leave {name} out"
            )


class Sites:
    """Where this rank stands in a mesh of sites and shards, and the groups that follow from it.

    Args:
        job: All ranks of all sites, with `Group.shards` and `Group.replicas`.

    Attributes:
        job: All ranks, which vote together: a shard's bad message must stop all of them.
        shards: The ranks of this site, which hold a model together.
        replicas: The ranks that hold this rank's shard, one at each site; they exchange.
    """

    def __init__(self, job: Group) -> None:
        assert job.shards is not None and job.replicas is not None, "of sharded models"
        self.job, self.shards, self.replicas = job, job.shards, job.replicas

    @classmethod
    def of(cls, mesh: DeviceMesh, timeout: float | datetime.timedelta | None = None) -> "Sites":
        """The sites of this job.

        Args:
            mesh: With the dimensions "replicate" (the sites) and "shard"; see `require_mesh`.
            timeout: As for `Group`.

        Communication: making the first one over a mesh is collective over all ranks.
        """
        require_mesh(mesh)
        job = Group(None, timeout)
        job.shards = Group(mesh.get_group("shard"), timeout)
        job.replicas = Group(mesh.get_group("replicate"), timeout)
        shard_of = {rank: i for site in mesh.mesh.tolist() for i, rank in enumerate(site)}
        job.parts = [shard_of[rank] for rank in range(job.size)]
        return cls(job)

    @property
    def shard(self) -> int:
        """Which shard this rank holds, from 0."""
        return self.shards.rank


class Replicas:
    """The ranks that hold the same shard, one at each site, as the sources of an exchange.

    `bytes_sent`, `bytes_received` and `wait_s` have the votes of the job and what shards tell each
    other besides; `bytes_between_nodes` is what this rank's exchange gave to other sites.
    """

    node_size = 1

    def __init__(self, sites: Sites) -> None:
        self.sites = sites
        self._groups = sites.replicas, sites.job, sites.shards
        self._sent_before = sites.replicas.bytes_sent

    @property
    def rank(self) -> int:
        """See `Group`: which site this is."""
        return self.sites.replicas.rank

    @property
    def size(self) -> int:
        """See `Group`: sites."""
        return self.sites.replicas.size

    @property
    def proofs(self) -> Proofs | None:
        """See `Group`."""
        return self.sites.replicas.proofs

    @property
    def bytes_sent(self) -> int:
        """See `Group`."""
        return sum(group.bytes_sent for group in self._groups)

    @property
    def bytes_received(self) -> int:
        """See `Group`."""
        return sum(group.bytes_received for group in self._groups)

    @property
    def wait_s(self) -> float:
        """See `Group`."""
        return sum(group.wait_s for group in self._groups)

    @property
    def rate_bit_s(self) -> float:
        """Of the line between the sites; see `Group`."""
        return self.sites.replicas.rate_bit_s

    @property
    def bytes_between_nodes(self) -> int:
        """Bytes that this rank gave to exchanges between the sites, agreements aside."""
        sites = self.sites.replicas
        return 0 if sites.size == 1 else sites.bytes_sent - self._sent_before

    def abandon(self, reason: str) -> None:
        """See `Group.abandon`."""
        for group in self._groups:
            group.abandon(reason)

    def all_gather(self, message: Tensor, *, what: str) -> Pending[Tensor]:
        """See `Group.all_gather`."""
        return self.sites.replicas.all_gather(message, what=what)

    def all_to_all(self, parts: Tensor, lengths: Sequence[int], *, what: str) -> Pending[Tensor]:
        """See `Group.all_to_all`."""
        return self.sites.replicas.all_to_all(parts, lengths, what=what)

    def all_reduce_(self, buffer: Tensor, *, what: str) -> Pending[Tensor]:
        """See `Group.all_reduce_`."""
        return self.sites.replicas.all_reduce_(buffer, what=what)
