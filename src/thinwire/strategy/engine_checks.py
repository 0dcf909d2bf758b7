"""Checks that ride in an engine's agreements: remaining batches, and changed buffers."""

from collections.abc import Mapping

from torch import Tensor, nn

from thinwire._names import named_buffers
from thinwire.comm import Group, wrong_call_site
from thinwire.comm.replicate import copy_from_first_
from thinwire.errors import Mismatch, PayloadCorrupt
from thinwire.exchange.agreement import Agreement, Answers, Report, Vote
from thinwire.local.model import changed_since, shape_text


class Batches:
    """Reports which ranks have a batch, inside `engine.join()`, if every update is exchanged."""

    def __init__(self) -> None:
        self.begin(inside=False)

    def begin(self, *, inside: bool) -> None:
        """Begin anew, `inside` the block or outside."""
        self.inside = inside
        """True if this rank is inside `join`."""
        self.has_batch = True
        """True if this rank has a batch."""
        self.merged = 0
        """Microsteps of this rank's unfinished update. After the last one of all ranks: the maximum
        over ranks.
        """
        self.all_have = True
        """True if all ranks had a batch in the last update."""

    def report(self, vote: Vote) -> Report:
        """See `Check`."""
        if not (self.inside and vote.first):
            return {}
        return {"batches": True} if self.has_batch else {"batches": False, "merged": self.merged}

    def judge(self, vote: Vote, answers: Answers) -> None:
        """See `Check`."""
        if not vote.first:
            return
        batches = dict(answers.of("batches"))
        if not batches:
            return
        for rank in range(len(answers)):
            if rank not in batches:
                raise wrong_call_site("asking which ranks still have batches", rank)
        self.all_have = all(batches.values())
        if not any(batches.values()):
            self.merged = max(merged for _, merged in answers.of("merged"))


class Joining:
    """Votes inside `engine.join()` under local updates, on which ranks still have batches."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.begin(inside=False)

    def begin(self, *, inside: bool) -> None:
        """Begin anew, `inside` the block or outside."""
        self.inside = self.due = inside
        """`due`: True if the next microstep begins with a vote."""

    def vote(self, *, active: bool) -> bool:
        """Return True if any rank still has a batch. All ranks must call this."""
        action = "asking which ranks still have batches"
        while self.due:
            with self._group.one_deadline():
                answers = self._group.gather_bytes(b"+" if active else b"-", action=action)
                for rank, answer in enumerate(answers):
                    if answer not in (b"+", b"-"):
                        raise wrong_call_site(action, rank, answer)
                self.due = False
                return b"+" in answers
        return True


class MovingBuffers:
    """Copies the buffers that changed from rank 0 after each update; the agreement names them."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._model = model
        self.group = group
        self._seen: dict[str, Tensor] = {}
        self._damage: str | None = None
        self._alike = True
        # each agreement permits one copy
        self._reported = False
        self._changed: list[str] = []
        self.forget()

    def forget(self, *, equal: bool = True, alike: bool = True) -> None:
        """Mark the current buffers as equal, or send all of them at the next update."""
        self._equal = equal and alike
        self._alike = alike
        if self.group.size > 1:
            self._seen = {
                name: buffer.detach().clone() for name, buffer in named_buffers(self._model)
            }

    def report(self, vote: Vote) -> Report:
        """See `Check`."""
        if not vote.first:
            return {}
        self._reported = self.group.size > 1 and not (self._alike and not self._seen)
        if not self._reported:
            return {}
        buffers = dict(named_buffers(self._model))
        changed = changed_since(self._seen if self._equal else {}, buffers)
        own = {name: shape_text(buffers[name]) for name in changed}
        own |= dict.fromkeys(sorted(self._seen.keys() - buffers.keys()), "not there")
        report: Report = {"buffers": own}
        return report if self._damage is None else {**report, "damage": self._damage}

    def judge(self, vote: Vote, answers: Answers) -> None:
        """See `Check`."""
        if not vote.first:
            return
        for _, damage in answers.of("damage"):
            raise PayloadCorrupt(damage)
        for part in answers.by_part():
            rows = {rank: report.get("buffers", {}) for rank, report in part.items()}
            own = vote.group.rank in part
            for name in dict.fromkeys(name for row in rows.values() for name in row):
                before = shape_text(self._seen[name]) if own and name in self._seen else "not there"
                first_report = next(row[name] for row in rows.values() if name in row)
                # a rank that reports nothing has not changed the buffer: its last known shape
                # counts
                unsaid = before if own else first_report
                _require_alike(name, {rank: row.get(name, unsaid) for rank, row in rows.items()})
        rows_here = [report.get("buffers", {}) for report in answers.of_my_part()]
        self._changed = list(dict.fromkeys(name for row in rows_here for name in row))

    def copy_(self) -> None:
        """Copy the changed buffers from rank 0, as the last agreement reported them."""
        if not self._reported:
            return
        self._reported = False
        buffers = dict(named_buffers(self._model))
        for name in self._seen.keys() - buffers.keys():
            del self._seen[name]
        moved = [name for name in buffers if name in set(self._changed)]
        if moved:
            action = "copying the buffers of rank 0"
            try:
                copy_from_first_((buffers[name] for name in moved), self.group, action=action)
            except PayloadCorrupt as error:
                self._damage = str(error)
                raise
        self._seen.update({name: buffers[name].detach().clone() for name in moved})
        self._equal = self._alike = True

    def synchronize(self) -> None:
        """Make the buffers equal outside an update."""
        if self.group.size > 1 and not (self._alike and not self._seen):
            Agreement(self.group, [self])(0, "comparing which buffers changed")
            self.copy_()


def _require_alike(name: str, by_rank: Mapping[int, str]) -> None:
    first = min(by_rank)
    for rank, description in by_rank.items():
        if description != by_rank[first]:
            raise Mismatch(
                f"buffer {name} is {by_rank[first]} on rank {first} and {description} on rank "
                f"{rank}, so the buffer of rank {first} cannot be copied to all ranks. Keep values "
                "that differ between ranks, such as a cache, in a plain attribute of the module. "
                "No update was made, and no buffer was copied"
            )
