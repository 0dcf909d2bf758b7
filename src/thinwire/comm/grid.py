"""The process groups of pipelines that train side by side: one over the stages of a replica, one
over the replicas.
"""

import datetime
import weakref

import torch.distributed as dist

from thinwire.comm.failures import explain_failure
from thinwire.comm.group import Group
from thinwire.comm.private import Private, is_alone, timeout_s_of
from thinwire.comm.waiting import seconds_of
from thinwire.errors import StrategyError, ThinwireError

__all__ = ["Grid"]


class Grid:
    """Rank = replica · stages + stage: the stages of one replica are consecutive ranks.

    Attributes:
        stages: Stages of a pipeline.
        replicas: Pipelines side by side, ranks / stages.
        stage: Which stage this rank holds, from 0.
        replica: Which pipeline this rank belongs to, from 0.
        peers: The stages of this rank's replica, for what they agree on; their traffic is apart
            from `stage_group`'s.
        job: All ranks, which agree on every update: a stage must not go on where another cannot.

    Args:
        stages: Stages of a pipeline.
        timeout: As for `Group`.

    Communication: making it is collective over all ranks; the groups are made once for each number
    of stages and each time-out, and they are freed at exit.

    Raises:
        StrategyError: The number of ranks is no multiple of `stages`.
    """

    def __init__(self, stages: int, timeout: float | datetime.timedelta | None = None) -> None:
        joined = not is_alone()
        rank, size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        if size % stages:
            fitting = sorted({stages * max(size // stages, 1), stages * (size // stages + 1)})
            raise StrategyError(
                f"a pipeline of {stages} stages needs a multiple of {stages} ranks, there are "
                f"{size}: start {' or '.join(map(str, fitting))} ranks, or change stages"
            )
        self.stages, self.replicas = stages, size // stages
        self.replica, self.stage = divmod(rank, stages)
        self._groups: tuple[Private, Private] | None = (
            _groups_of(self, seconds_of(timeout)) if joined else None
        )
        self._joined = joined
        self.peers = Group(self.stage_group, timeout)
        self.job = Group(None, timeout)
        self.job.replicas = Group(self.replica_group, timeout)
        self.job.parts = [rank % stages for rank in range(size)] if stages > 1 else ()

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks of this replica's pipeline, in the order of the stages; None without a process
        group.
        """
        return self._group(0)

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold this stage, in the order of the replicas; None without a process
        group.
        """
        return self._group(1)

    def explain(self, error: RuntimeError, *, what: str) -> ThinwireError:
        """The error to raise for a transfer between stages that failed; keep `error` as its cause.

        Args:
            error: What the backend raised.
            what: The transfer in plain words.

        Returns:
            `PeerStalled`, `PeerLost` or `ThinwireError`, as for `Group`; ranks are counted within
            the replica.
        """
        peers = self.peers
        shared = peers._shared
        return explain_failure(
            error,
            what=what,
            rank=peers.rank,
            size=peers.size,
            within=f"{peers.timeout_s:g} s",
            courier=None if shared is None else shared.courier,
        )

    def _group(self, which: int) -> dist.ProcessGroup | None:
        if not self._joined:
            return None
        group = None if self._groups is None else self._groups[which].group
        if group is None:
            raise ThinwireError(
                "the pipeline's process groups have been released: nothing can be exchanged at exit"
            )
        return group


_Made = dict[tuple[int, float], tuple[Private, Private]]
_shared: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Made]" = weakref.WeakKeyDictionary()


def _groups_of(grid: Grid, own_s: float | None) -> tuple[Private, Private]:
    """The groups of the stages and of the replicas that this rank belongs to, made once."""
    world = dist.group.WORLD
    assert world is not None
    timeout_s = timeout_s_of(world) if own_s is None else own_s
    made, key = _shared.setdefault(world, {}), (grid.stages, timeout_s)
    if key not in made:
        first = grid.replica * grid.stages
        stages = list(range(first, first + grid.stages))
        replicas = [replica * grid.stages + grid.stage for replica in range(grid.replicas)]
        # transfers between stages are torch's own, so the backend has to watch the time
        made[key] = Private(stages, timeout_s, timed=True), Private(replicas, timeout_s, timed=True)
    return made[key]
