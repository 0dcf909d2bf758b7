"""A generation: the members between two changes, and how the next one is decided."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.comm.member_groups import MemberGroups


@dataclass(frozen=True)
class Decision:
    """Members of a generation, as written once in the store by the first member that decides."""

    ids: tuple[str, ...]
    continuing: tuple[str, ...]
    votes: int
    answers: tuple[bytes, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can represent."""
        members = {"ids": self.ids, "settled": self.continuing}
        return members | {"votes": self.votes, "answers": packed(self.answers)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "Decision":
        """Return the decision that `to_dict` wrote."""
        answers = tuple(unpacked(value["answers"]))
        return cls(tuple(value["ids"]), tuple(value["settled"]), value["votes"], answers)


@dataclass
class Generation:
    """A generation that this member belongs to."""

    number: int
    ids: tuple[str, ...]
    """The members in the order of their ranks."""
    rank: int
    quorum_base: tuple[str, ...]
    """Members of which the next one needs more than half: `continuing`, all after an agreement."""
    groups: MemberGroups | None = None

    def disconnect(self) -> None:
        """End all waits of its members for each other."""
        if self.groups is not None:
            self.groups.disconnect()

    @property
    def size(self) -> int:
        """Members."""
        return len(self.ids)


def next_decision(
    ids: Sequence[str], announced: Mapping[str, Mapping[str, Any]], quorum_base: Sequence[str]
) -> tuple[Decision, Sequence[str]]:
    """Return the next generation, made of the members that are present."""
    # if all are present but some could not connect, the joiners are dropped: one of them may be
    # unreachable. More than half of `quorum_base` must be present, unless a member has voted
    announced_ids = [member for member in ids if member in announced]
    present = tuple(member for member in announced_ids if not announced[member]["left"])
    latest = max(announced_ids, key=lambda member: announced[member]["votes"])
    votes = announced[latest]["votes"]
    if any(announced[member]["voted"] for member in announced_ids):
        quorum_base = ids
    electorate = [
        member for member in quorum_base if member in present or member not in announced_ids
    ]
    answers = tuple(unpacked(announced[latest]["answers"]))
    connecting = any(one["connecting_s"] is not None for one in announced.values())
    if connecting and len(present) == len(ids):
        present = tuple(member for member in present if member in quorum_base)
    continuing = tuple(member for member in present if member in electorate)
    return Decision(present, continuing, votes, answers), electorate


def packed(answers: Sequence[bytes]) -> list[str]:
    """Return byte strings as base64 texts."""
    return [base64.b64encode(answer).decode() for answer in answers]


def unpacked(texts: Sequence[str]) -> list[bytes]:
    """Return the byte strings that `packed` encoded."""
    return [base64.b64decode(text) for text in texts]
