"""A generation: the members between two changes, and how the next one is decided."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from thinwire.comm.macs import MessageMacs
from thinwire.comm.member_groups import MemberGroups


class Outcome(NamedTuple):
    """An agreement: its number, and the answers of its voters, in their order."""

    vote: int
    answers: Sequence[bytes] = ()
    voters: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can represent."""
        return {**self._asdict(), "answers": packed(self.answers)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "Outcome":
        """Return the outcome that `to_dict` wrote."""
        return cls(value["vote"], unpacked(value["answers"]), value["voters"])


class Decision(NamedTuple):
    """Members of a generation, as written once in the store by the first member that decides."""

    ids: tuple[str, ...]
    continuing: tuple[str, ...]
    agreed: Outcome = Outcome(0)
    """Last agreement before it."""

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can represent."""
        return {"ids": self.ids, "continuing": self.continuing, **self.agreed.to_dict()}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "Decision":
        """Return the decision that `to_dict` wrote."""
        return cls(tuple(value["ids"]), tuple(value["continuing"]), Outcome.from_dict(value))


@dataclass
class Generation:
    """A generation that this member belongs to."""

    number: int
    ids: tuple[str, ...]
    """The members in the order of their ranks."""
    rank: int
    continuing: tuple[str, ...]
    """Members that were in the one before, all after an agreement; the others are joiners."""
    groups: MemberGroups | None = None
    present: "Generation | None" = None
    """Those of its members that make the present round, if others are late."""
    macs: tuple[MessageMacs | None, MessageMacs | None] | None = None
    """MACs of its messages and agreements, which count them."""

    def present_ids(self, present: Sequence[str] | None) -> tuple[str, ...]:
        """Return its members among those present; None: all."""
        return self.ids if present is None else tuple(one for one in self.ids if one in present)

    def disconnect(self) -> None:
        """End all waits of its members for each other."""
        if self.groups is not None:
            self.groups.disconnect()
        if self.present is not None:
            self.present.disconnect()

    def release(self) -> None:
        """Close the connections of its members for good."""
        if self.groups is not None:
            self.groups.release()
            self.groups = None
        self.release_present()

    def release_present(self) -> None:
        """Close the connections of a round that some members were late for."""
        if self.present is not None:
            self.present.release()
            self.present = None

    @property
    def size(self) -> int:
        """Members."""
        return len(self.ids)


def next_decision(
    ids: Sequence[str], announced: Mapping[str, Mapping[str, Any]], continuing: Sequence[str]
) -> tuple[Decision, list[str]]:
    """Return the next generation, made of the members that are present, and who is lost by it."""
    # if all are present but some could not connect, the joiners are dropped: one of them may be
    # unreachable. Later the largest side stays, of equal ones the one with the lowest rank
    announced_ids = [member for member in ids if member in announced]
    present = [member for member in announced_ids if not announced[member]["left"]]
    latest = max((announced[member] for member in announced_ids), key=itemgetter("vote"))
    if any(announced[member]["voted"] for member in announced_ids):
        continuing = ids
    connecting = any(one["connecting_s"] is not None for one in announced.values())
    if connecting and len(present) == len(ids):
        present = [member for member in present if member in continuing]
    if any(announced[member]["reached"] for member in present):
        reached = {member: announced[member]["reached"] or ids for member in present}
        present = max((_connected(reached, first) for first in present), key=len)
    left = {member for member in announced_ids if announced[member]["left"]}
    lost = [member for member in continuing if member not in left and member not in present]
    stay = tuple(member for member in present if member in continuing)
    return Decision(tuple(present), stay, Outcome.from_dict(latest)), lost


def _connected(reached: Mapping[str, Sequence[str]], first: str) -> list[str]:
    """Return `first` and others, in order, that all reach each other."""
    found = [first]
    for other in reached:
        if all(one != other and one in reached[other] and other in reached[one] for one in found):
            found.append(other)
    return [member for member in reached if member in found]


def packed(answers: Sequence[bytes]) -> list[str]:
    """Return byte strings as base64 texts."""
    return [base64.b64encode(answer).decode() for answer in answers]


def unpacked(texts: Sequence[str]) -> list[bytes]:
    """Return the byte strings that `packed` encoded."""
    return [base64.b64decode(text) for text in texts]
