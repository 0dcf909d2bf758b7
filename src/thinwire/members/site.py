"""A site that is one member: ranks which hold a model in shards, and come and go together."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from thinwire.comm import Group, is_alone, require_mesh
from thinwire.comm.waiting import own_deadlines
from thinwire.errors import PeerLost, ThinwireError
from thinwire.members.generation import packed, unpacked
from thinwire.members.group import ElasticGroup

__all__ = ["Site", "SiteGroup"]

_PATIENCE = 3
"""Time-outs for which the ranks of a site wait for each other: one of them may regroup meanwhile,
with the members that hold its shard."""
_BUILDS_S = 120.0
_END = "the end"


class Site:
    """The ranks of this site, all those of its job.

    Args:
        mesh: Of one site: (1, shards), with the dimensions "replicate" and "shard".
        timeout_s: Of the members.

    Attributes:
        mesh: As given.
        ranks: The ranks of the site.

    Raises:
        TypeError, ValueError: See `require_mesh`; or it has several sites.

    Communication: making the first one over a mesh is collective over its ranks.
    """

    def __init__(self, mesh: DeviceMesh, timeout_s: float) -> None:
        if is_alone():
            raise ValueError(
                "mesh was given but torch.distributed is not initialized: call init_process_group "
                "first, for the ranks of this site alone"
            )
        require_mesh(mesh)
        sites = mesh.size(0)
        if sites != 1:
            raise ValueError(
                f"mesh has {sites} sites, and a member is one: start every site as a job of its "
                "own, with a mesh of (1, shards) over its ranks"
            )
        self.mesh = mesh
        self.ranks = Group(mesh.get_group("shard"), _PATIENCE * timeout_s + _BUILDS_S)
        self._over = False
        """Whether the ranks have lost each other: nothing is told any more."""

    @property
    def rank(self) -> int:
        """Of this process in the site, which is the number of its shard."""
        return self.ranks.rank

    @property
    def size(self) -> int:
        """Shards."""
        return self.ranks.size

    def all_say(self, what: str, value: Any) -> list[Any]:
        """What every rank of the site says on an occasion, in rank order, as JSON holds it.

        Raises:
            ThinwireError: A rank of the site speaks on another occasion.
            PeerLost, PeerStalled: One of them has gone, or says that it ends.
        """
        said = json.dumps([what, value], separators=(",", ":")).encode()
        over, self._over = self._over, True
        with own_deadlines():
            answers = self.ranks.gather_bytes(said, what=f"{what}, inside the site")
        rows = [json.loads(answer) for answer in answers]
        for rank, (occasion, text) in enumerate(rows):
            if occasion == _END != what:
                raise PeerLost(f"{what}: rank {rank} of this site has ended: {text}")
            if occasion != what:
                raise ThinwireError(
                    f"{what}: rank {rank} of this site is at another place ({occasion}). All of "
                    "them must make the same calls in the same order; start the site again"
                )
        self._over = over
        return [value for _, value in rows]

    def first_says(self, what: str, value: Any) -> Any:
        """What the first rank of the site says; the others give anything."""
        return self.all_say(what, value if self.rank == 0 else None)[0]

    def tell_end(self, error: ThinwireError) -> None:
        """Tell the other ranks of the site, wherever they wait for this one, why it ends; once."""
        if not self._over:
            with contextlib.suppress(ThinwireError):
                self.all_say(_END, f"{type(error).__name__}: {error}")
            self._over = True

    def require_none(self, what: str, problem: ThinwireError | None) -> None:
        """Raise this rank's problem, or tell of that of another rank of the site.

        Raises:
            ThinwireError: `problem`; or PeerLost.
        """
        told = self.all_say(what, None if problem is None else str(problem))
        if problem is not None:
            raise problem
        for rank, text in enumerate(told):
            if text is not None:
                raise PeerLost(f"{what}: rank {rank} of this site: {text}")


class SiteGroup(Group):
    """All ranks of all sites that take part, as far as they agree with each other.

    Those that hold the same shard agree among themselves, at every site: an agreement that breaks
    off is theirs to make again, see `ElasticGroup`. Once it has come about the ranks of each site
    tell each other what they have heard. A site that was lost may have been heard by those of one
    shard and not of another: it counts nowhere then, so that all judge the same answers. What it
    had sent may still be in the mean of one shard.

    Its ranks are those of the first site by their shards, those of the second, and so on.
    """

    stays = False

    def __init__(self, site: Site, lane: ElasticGroup) -> None:
        self._begin(lane.timeout_s)
        self.site, self.shards, self.replicas = site, site.ranks, lane
        self._lane, self._heard = lane, [lane.keeper.me]

    @property
    def rank(self) -> int:
        """Of this process."""
        return self._lane.rank * self.site.size + self.site.rank

    @rank.setter
    def rank(self, _: int) -> None:
        """It follows the members."""

    @property
    def parts(self) -> list[int]:  # type: ignore[override]
        """Of each of the last answers the shard of its rank; a site that was lost gave none."""
        return list(range(self.site.size)) * len(self._heard)

    @property
    def place(self) -> int:
        """See `Group.place`."""
        return self._heard.index(self._lane.keeper.me) * self.site.size + self.site.rank

    @property
    def size(self) -> int:
        """Ranks of all sites."""
        return self._lane.size * self.site.size

    @size.setter
    def size(self, _: int) -> None:
        """It follows the members."""

    @contextlib.contextmanager
    def one_attempt(self) -> Iterator[None]:
        """See `Group.one_attempt`."""
        with self._ending_together(), self._lane.one_attempt():
            yield

    @contextlib.contextmanager
    def _ending_together(self) -> Iterator[None]:
        """Where this rank cannot go on among the members, its site cannot."""
        try:
            yield
        except ThinwireError as error:
            if self._lane.keeper.end is not None:
                self.site.tell_end(error)
            raise

    def gather_bytes(self, payload: bytes, *, what: str) -> list[bytes]:
        """See `Group.gather_bytes`; of the ranks of all sites whose answers were heard by every
        rank of this one.
        """
        with self._ending_together():
            answers = self._lane.gather_bytes(payload, what=what)
        ids = self._lane.keeper.voters
        alike = len(set(answers)) == 1
        told = {"ids": ids, "answers": packed(answers[:1] if alike else answers)}
        lanes = self.site.all_say(what, told)
        known = [set(_ids_of(lane)) for lane in lanes]
        self._heard = common = [each for each in _ids_of(lanes[0]) if all(each in x for x in known)]
        heard = [dict(zip(_ids_of(lane), _answers_of(lane), strict=True)) for lane in lanes]
        return [lane[each] for each in common for lane in heard]


def _ids_of(lane: dict[str, Any]) -> list[str]:
    """Of the sites that one rank has heard."""
    found: list[str] = lane["ids"]
    return found


def _answers_of(lane: dict[str, Any]) -> list[bytes]:
    answers = unpacked(lane["answers"])
    return answers * len(_ids_of(lane)) if len(answers) == 1 else answers
