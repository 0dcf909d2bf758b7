"""Base of every exchange: the ranks of a training, their agreements, and replicated state."""

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire import _validate as check
from thinwire._version import __version__
from thinwire.comm import (
    Group,
    Sources,
    next_identity,
    node_size_of,
    one_deadline,
    rank_and_size_in,
    require_agreement,
    require_mesh,
    require_process_group,
    seconds_of,
    sites_of,
    sources_of,
    time_limit_s,
    while_busy,
)
from thinwire.comm.stats import Pace
from thinwire.core.arithmetic import CURES
from thinwire.core.norms import norm_of
from thinwire.exchange.agreement import COMPARING, Agreement, Check, Drops
from thinwire.exchange.checks import DuplicateBatchCheck
from thinwire.exchange.digest import FORWARD, RollingDigest
from thinwire.exchange.replica import Replica

_CURES = CURES | {
    "initial value (CRC-32) of": "All ranks must begin with the same parameters. They differ where "
    f"seeds differ, or by {FORWARD}"
}


class RunMember(Protocol):
    """A member of a run, such as `thinwire.members.members.Member`."""

    @property
    def job(self) -> Group:
        """All ranks that agree."""

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """Rank of this process, and number of ranks."""


class Ranks:
    """The ranks of one training, as the user gives them; None stands for all of this job."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        timeout: float | datetime.timedelta | None = None,
        mesh: DeviceMesh | None = None,
        member: RunMember | None = None,
        node_size: int | None = None,
        streams: int | None = None,
        between_sites: bool = False,
    ) -> None:
        # between sites all data travels by gloo, unless the user named the ranks, with a backend
        require_process_group(process_group)
        self._gloo = between_sites and process_group is None
        self.timeout_s = seconds_of(timeout)
        self.streams = None if streams is None else check.integer("streams", streams, at_least=1)
        if mesh is not None and member is None:
            size = None if node_size == 1 else node_size
            require_mesh(mesh, process_group=process_group, node_size=size)
        self.process_group = process_group
        self.mesh = mesh
        self.member = member

    @cached_property
    def group(self) -> Group:
        """All ranks that agree. With a mesh, creating it is collective."""
        # members bring their group; meshes and process groups make one
        if self.member is not None:
            return self.member.job
        if self.mesh is not None:
            return sites_of(self.mesh, self.timeout_s, self.streams)
        return Group(self.process_group, self.timeout_s, self.streams, gloo=self._gloo)

    @property
    def facts(self) -> dict[str, Any]:
        """Settings of the exchanges, which must be equal on all ranks."""
        return {"timeout in seconds": self.group.timeout_s, "streams": self.streams}

    @property
    def shards(self) -> DeviceMesh | None:
        """The mesh of this site's shards."""
        return None if self.mesh is None else self.mesh["shard"]

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """Rank of this process, and number of ranks."""
        if self.member is not None:
            return self.member.rank_and_size
        return rank_and_size_in(self.process_group)

    def deadline(self) -> AbstractContextManager[None]:
        """Return a context in which all waiting counts against one time-out."""
        if self.member is not None:
            return self.member.job.one_deadline()
        return one_deadline(time_limit_s(self.process_group, self.timeout_s))

    def identity(self, kind: str) -> str:
        """Return the identity of the next engine or optimizer over these ranks."""
        # processes of members may have created other engines before, so counts would differ
        single = self.member is not None
        return kind if single else f"{kind} {next_identity(self.process_group)}"

    def compare(self, facts: Mapping[str, Any], purpose: str) -> None:
        """Compare facts over all ranks; see `require_agreement`."""
        require_agreement(self.group, facts, action=purpose, cures=_CURES, versions=versions())

    def sources(self, node_size: int | None, *, compared: bool = False) -> Sources:
        """Return the units that count as one source each; `compared`: ranks agree on their size."""
        # the order matters: a site counts once, whatever its nodes are
        if self.group.replicas is not None:
            return self.group.replicas
        if self.member is not None:
            return self.group
        return agreed_sources(self.group, node_size, compared=compared)

    def compile(self, loops: Callable[[], None]) -> None:
        """Compile loops while the other ranks wait."""
        while_busy(self.group, "compiling loops", loops)


def agreed_sources(group: Group, node_size: int | None, *, compared: bool = False) -> Sources:
    """Return the ranks, or their nodes, after all ranks agreed on the node size."""
    # every rank looks for itself, and may find another size
    width, _ = node_size_of(group.global_ranks, node_size)
    if node_size is None and not compared:
        require_agreement(group, {"ranks of a node": width}, action="comparing nodes")
    return sources_of(group, width)


def versions() -> dict[str, str]:
    """Return the versions that may differ between ranks."""
    return {"thinwire": __version__, "torch": str(torch.__version__)}


COUNTED = ("bytes_sent", "bytes_received", "bytes_between_nodes", "wait_s")
"""Counters that continue after a resume."""
NO_TRAFFIC = dict.fromkeys((*COUNTED, "rate_bit_s", "waiting_share", "error_norm"), 0)
"""Counters before the first exchange; see `Synchronizer.traffic`."""


class Synchronizer:
    """Base of the two exchanges: `GradientExchange`, in every update, and `Averager`, periodically.

    Both measure what this rank would send, agree to send it, send, verify what arrived, and agree
    that all is well. Only then do they change parameters and state.
    """

    def __init__(
        self,
        group: Group,
        sources: Sources,
        *,
        kind: Literal["gradients", "changes"],
        before: Sequence[Check] = (),
        after: Sequence[Check] = (),
    ) -> None:
        self.group = group
        self.sources = sources
        own = [sources.leaders, sources.all_ranks, sources.node]
        shards = [] if group.shards is None else [group.shards]
        self._groups = list(dict.fromkeys([*own, group, *shards]))
        self.duplicates = DuplicateBatchCheck(kind)
        self.drops = Drops()
        self.agreement = Agreement(group, [*before, self.duplicates, self.drops, *after])
        self._after = len(after)
        self.pace = Pace()
        self.same: RollingDigest | None = None
        """Digest of the replicated state. None if nothing is compared."""
        self.bytes_of_others = 0
        """Bytes that a DistributedDataParallel model has summed since it was found to do so too."""
        self._before: dict[str, float] = dict.fromkeys(COUNTED, 0)

    def add_check(self, check: Check) -> None:
        """Add a check to all agreements. It judges after those added before."""
        # before those of `after`, which judge last
        checks = self.agreement.checks
        checks.insert(len(checks) - self._after, check)

    def watch(self, replica: Replica, identity: str) -> None:
        """Compare this replica in all agreements, in place of the one before."""
        checks = self.agreement.checks
        self.agreement.engine = identity
        checks[:] = [one for one in checks if not isinstance(one, Replica)]
        self.add_check(replica)
        # members may join later, so a group of one still compares
        single = self.group.size == 1 and self.group.static_membership
        self.same = None if single else replica.digest

    def require_equal(self, step: int) -> None:
        """Compare all replicated state: `Diverged` or `Mismatch` on every rank."""
        if self.same is None:
            return
        with self.group.uncounted():  # not part of an update's exchange
            self.agreement(step, COMPARING, first=False)
            if self.group.size > 1:
                self.same.require_equal(self.agreement, step)

    def _totals(self) -> dict[str, float]:
        """Return the counters of messages and waiting in this process, by name."""
        others = round(2 * (1 - 1 / self.group.size) * self.bytes_of_others)  # by rings
        between = self.sources.leaders.bytes_sent + others
        # votes of other ranks too go over all of them, so they count as traffic between nodes
        if self.group is not self.sources.all_ranks and self.group.shards is None:
            between += self.group.bytes_sent
        return {
            "bytes_sent": sum(group.bytes_sent for group in self._groups) + others,
            "bytes_received": sum(group.bytes_received for group in self._groups),
            "bytes_between_nodes": between,
            "wait_s": self.waited_s,
        }

    def counted(self) -> dict[str, float]:
        """Return the counters of this rank's messages and waiting, earlier runs included."""
        return {name: total - self._before[name] for name, total in self._totals().items()}

    def count_from(self, counted: Mapping[str, float]) -> None:
        """Continue the counters of an earlier run."""
        # those of groups never go back: remember the offset instead
        for name, total in self._totals().items():
            check.real(name, counted.get(name), at_least=0)
            self._before[name] = total - counted[name]

    def start_counting(self) -> None:
        """Attribute the exchange so far to the start."""
        self._before = self._totals()

    @property
    def waited_s(self) -> float:
        """Seconds for which this rank waited for others, in this process."""
        return sum(group.wait_s for group in self._groups)

    def traffic(self) -> dict[str, Any]:
        """Return counters and rates under the names of `thinwire.comm.stats`."""
        rates = {"rate_bit_s": self.sources.rate_bit_s, "waiting_share": self.pace.waiting_share}
        return {**self.counted(), **rates, "error_norm": norm_of(self._residuals())}

    def _residuals(self) -> Iterable[Tensor]:
        """Return what this rank has not sent yet."""
        raise NotImplementedError
