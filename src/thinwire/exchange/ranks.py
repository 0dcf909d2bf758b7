"""Who trains together: the ranks of a process group, sites of a mesh, or members of a run."""

import datetime
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thinwire._version import __version__
from thinwire.comm import (
    Group,
    Replicas,
    Sites,
    Sources,
    next_identity,
    node_size_of,
    one_deadline,
    place_in,
    require_agreement,
    require_mesh,
    require_process_group,
    seconds_of,
    sources_of,
    time_limit_s,
    while_busy,
)
from thinwire.core.arithmetic import CURES
from thinwire.kernels.rules import Need
from thinwire.kernels.warm import warm_up

__all__ = ["Joined", "Ranks", "agreed_sources", "versions"]


class Joined(Protocol):
    """A member of a run; `thinwire.members.Members` is one."""

    @property
    def job(self) -> Group:
        """All that agree."""

    @property
    def timeout_s(self) -> float:
        """For how long a member waits for others."""

    @property
    def place(self) -> tuple[int, int]:
        """This rank's number, and how many there are."""


class Ranks:
    """The ranks of one training, as its user names them.

    Args:
        process_group: None for all of them.
        timeout: For how long a rank waits for others in one call; None: as the process group.
        mesh: Of sites and shards, instead of `process_group`.
        members: Of a run, instead of `process_group` and `timeout`.
        node_size: Consecutive ranks to a node, as the user says it; refused with a mesh.

    Raises:
        TypeError, ValueError: One of them is of a wrong kind, or two do not go together.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        timeout: float | datetime.timedelta | None = None,
        mesh: DeviceMesh | None = None,
        members: Joined | None = None,
        node_size: int | None = None,
    ) -> None:
        require_process_group(process_group)
        self.timeout_s = seconds_of(timeout)
        if mesh is not None and members is None:
            size = None if node_size == 1 else node_size
            require_mesh(mesh, process_group=process_group, node_size=size)
        self.process_group, self.mesh, self.members = process_group, mesh, members

    def again(self) -> "Ranks":
        """The same ranks, whose counters begin at zero."""
        again = Ranks(timeout=self.timeout_s, members=self.members)
        again.process_group, again.mesh = self.process_group, self.mesh
        return again

    @cached_property
    def group(self) -> Group:
        """All that agree. Making it is collective with a mesh."""
        if self.members is not None:
            return self.members.job
        if self.mesh is not None:
            return Sites.of(self.mesh, self.timeout_s).job
        return Group(self.process_group, self.timeout_s)

    @cached_property
    def sites(self) -> Sites | None:
        """None where every rank holds a whole model."""
        return None if self.mesh is None else Sites(self.group)

    @property
    def shards(self) -> DeviceMesh | None:
        """The mesh of this site."""
        return None if self.mesh is None else self.mesh["shard"]

    @property
    def place(self) -> tuple[int, int]:
        """This rank's number, and how many there are."""
        return place_in(self.process_group) if self.members is None else self.members.place

    def deadline(self) -> AbstractContextManager[None]:
        """Let all waiting inside count against one time-out."""
        if self.members is not None:
            return one_deadline(self.members.timeout_s)
        return one_deadline(time_limit_s(self.process_group, self.timeout_s))

    def identity(self, kind: str) -> str:
        """Which of the engines and optimizers over these ranks the next one is."""
        # members come from processes that have made other things before
        alone = self.members is not None
        return kind if alone else f"{kind} {next_identity(self.process_group)}"

    def compare(self, facts: Mapping[str, Any], what: str) -> None:
        """Compare facts over all ranks; see `require_agreement`."""
        group = self.group
        require_agreement(group, facts, what=what, cures=CURES, versions=versions())

    def sources(self, node_size: int | None, *, compared: bool = False) -> Sources:
        """Who counts as one source.

        Args:
            node_size: As the user says it, the same on all ranks; None to look for nodes.
            compared: Whether ranks have compared the size that was found.
        """
        if self.sites is not None:
            return Replicas(self.sites)
        if self.members is not None:
            return self.group
        return agreed_sources(self.group, node_size, compared=compared)

    def compile(self, needs: Collection[Need]) -> None:
        """Compile loops, while the other ranks wait."""
        while_busy(self.group, "compiling loops", lambda: float(warm_up(frozenset(needs)) > 0))


def agreed_sources(group: Group, node_size: int | None, *, compared: bool = False) -> Sources:
    """The ranks, or their nodes, once all ranks have found the same size of a node."""
    width, _ = node_size_of(group.global_ranks, node_size)
    if node_size is None and not compared:
        require_agreement(group, {"ranks of a node": width}, what="comparing nodes")
    return sources_of(group, width)


def versions() -> dict[str, str]:
    """What may differ between ranks."""
    return {"thinwire": __version__, "torch": str(torch.__version__)}
