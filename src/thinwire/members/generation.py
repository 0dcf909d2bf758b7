"""A generation: the members between two changes, and how the next one is decided."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thinwire.comm.direct import Direct

__all__ = ["Decision", "Generation", "agreed", "packed", "unpacked"]


@dataclass(frozen=True)
class Decision:
    """What is written once for a generation, by whoever comes first, and holds for all.

    Attributes:
        ids: The members in the order of their ranks.
        settled: Those of them who were there before.
        votes: Agreements that had come about in the run before this generation.
        answers: What all said in the last of them; empty where nobody needs to be told.
    """

    ids: tuple[str, ...]
    settled: tuple[str, ...]
    votes: int
    answers: tuple[bytes, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "ids": list(self.ids),
            "settled": list(self.settled),
            "votes": self.votes,
            "answers": packed(self.answers),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "Decision":
        """What `to_dict` gave."""
        answers = tuple(unpacked(value["answers"]))
        return cls(tuple(value["ids"]), tuple(value["settled"]), value["votes"], answers)


@dataclass
class Generation:
    """One of them, as this member sees it.

    Attributes:
        number: From 0.
        decision: Who belongs to it.
        rank: Of this member.
        groups: The process groups; None where it is alone.
    """

    number: int
    decision: Decision
    rank: int
    groups: Direct | None = None
    base: tuple[str, ...] = field(default=())
    """Of whom more than half must be there to go on: `settled` until the first agreement."""

    def __post_init__(self) -> None:
        self.base = self.decision.settled

    @property
    def ids(self) -> tuple[str, ...]:
        """The members in the order of their ranks."""
        return self.decision.ids

    @property
    def size(self) -> int:
        """Members."""
        return len(self.decision.ids)


def agreed(
    ids: Sequence[str], announced: Mapping[str, Mapping[str, Any]], base: Sequence[str]
) -> tuple[Decision, Sequence[str]]:
    """The next generation, of those who are there; where all are, though some could not be
    connected, without newcomers, one of whom may not reach all.

    Args:
        ids: The members of the last one.
        announced: By member its `votes`, `answers`, whether it has `voted` in this generation,
            `connecting_s`, which is None for those who were connected, and whether it has `left`
            by itself: what it heard holds, and nobody waits for it.
        base: Those who were in the run before; more than half of them must be there while nobody
            has voted.

    Returns:
        The decision; and those of whom more than half must be in it, if it is anybody.
    """
    heard = [each for each in ids if each in announced]
    there = tuple(each for each in heard if not announced[each]["left"])
    furthest = max(heard, key=lambda each: announced[each]["votes"])
    votes = announced[furthest]["votes"]
    base = ids if any(announced[each]["voted"] for each in heard) else base
    needed = [each for each in base if each in there or each not in heard]
    answers = tuple(unpacked(announced[furthest]["answers"]))
    apart = any(said["connecting_s"] is not None for said in announced.values())
    if apart and len(there) == len(ids):
        there = tuple(each for each in there if each in base)
    settled = tuple(each for each in there if each in needed)
    return Decision(there, settled, votes, answers), needed


def packed(answers: Sequence[bytes]) -> list[str]:
    """Byte strings as JSON holds them."""
    return [base64.b64encode(answer).decode() for answer in answers]


def unpacked(texts: Sequence[str]) -> list[bytes]:
    """What `packed` gave."""
    return [base64.b64decode(text) for text in texts]
