"""The process groups of pipelines that train side by side: one over the stages of a replica, one over the replicas."""

import atexit
import contextlib
import weakref

import torch.distributed as dist

from thinwire.comm.failures import explain_failure
from thinwire.comm.group import DEFAULT_TIMEOUT_S, Group, _release_all, _timeout_s, new_group
from thinwire.errors import StrategyError, ThinwireError

__all__ = ["Grid"]


class Grid:
    """Rank = replica · stages + stage: the stages of one replica are consecutive ranks.

    Attributes:
        stages: Stages of a pipeline.
        replicas: Pipelines side by side, ranks / stages.
        stage: Which stage this rank holds, from 0.
        replica: Which pipeline this rank belongs to, from 0.
        peers: The stages of this rank's replica, for what they agree on; their traffic is apart from `stage_group`'s.

    Communication: making it is collective over all ranks; the groups are made once for each number of stages. Their
        time-out is the smaller of the world's and 120 s, and they are let go of at exit.

    Raises:
        StrategyError: The number of ranks is no multiple of `stages`.
    """

    def __init__(self, stages: int) -> None:
        joined = dist.is_available() and dist.is_initialized()
        rank, size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        if size % stages:
            fitting = sorted({stages * max(size // stages, 1), stages * (size // stages + 1)})
            raise StrategyError(
                f"a pipeline of {stages} stages needs a multiple of {stages} ranks, there are {size}: start "
                f"{' or '.join(map(str, fitting))} ranks, or change stages"
            )
        self.stages, self.replicas = stages, size // stages
        self.replica, self.stage = divmod(rank, stages)
        self._groups: list[dist.ProcessGroup] = _groups_of(self) if joined else []
        self._joined = joined
        self.peers = Group(self.stage_group)

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks of this replica's pipeline, in the order of the stages; None without a process group."""
        return self._group(0)

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold this stage, in the order of the replicas; None without a process group."""
        return self._group(1)

    def explain(self, error: RuntimeError, *, what: str) -> ThinwireError:
        """The error to raise for a transfer between stages that failed; keep `error` as its cause.

        Args:
            error: What the backend raised.
            what: The transfer in plain words.

        Returns:
            `PeerStalled`, `PeerLost` or `ThinwireError`, as for `Group`; ranks are counted within the replica.
        """
        peers = self.peers
        return explain_failure(
            error, what=what, rank=peers.rank, size=peers.size, timeout_s=peers.timeout_s, store=peers._store
        )

    def _group(self, which: int) -> dist.ProcessGroup | None:
        if not self._joined:
            return None
        if not self._groups:
            raise ThinwireError("the pipeline's process groups have been released: nothing can be exchanged at exit")
        return self._groups[which]


_shared: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, list[dist.ProcessGroup]]]" = (
    weakref.WeakKeyDictionary()
)


def _groups_of(grid: Grid) -> list[dist.ProcessGroup]:
    """[stage_group, replica_group] of this rank, made once, in a list that is emptied at exit."""
    world = dist.group.WORLD
    assert world is not None
    made = _shared.setdefault(world, {})
    if grid.stages not in made:
        first = grid.replica * grid.stages
        timeout_s = min(_timeout_s(world), DEFAULT_TIMEOUT_S)
        made[grid.stages] = [
            new_group(list(range(first, first + grid.stages)), timeout_s),
            new_group([replica * grid.stages + grid.stage for replica in range(grid.replicas)], timeout_s),
        ]
    return made[grid.stages]


@atexit.register
def _release_groups() -> None:
    """Let go of the groups, those made over them first; for the reason see `thinwire.comm.group`."""
    _release_all()
    for holder in [groups for made in list(_shared.values()) for groups in made.values()]:
        for group in holder:
            if dist.is_initialized():
                with contextlib.suppress(ValueError, AssertionError):  # it belongs to a world that was destroyed before
                    dist.destroy_process_group(group)
        holder.clear()
