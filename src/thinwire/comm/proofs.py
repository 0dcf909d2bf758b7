"""Proofs that a message is from the rank it seems to be from, and meant for this place."""

import hashlib
import hmac
import struct
from collections.abc import Sequence
from typing import Final, final

import torch
from torch import Tensor

__all__ = ["ALL_RANKS", "PROOF_BYTES", "Proofs", "unproven"]

PROOF_BYTES: Final = 16
_PLACE: Final = struct.Struct("<QIi")
ALL_RANKS: Final = -1


@final
class Proofs:
    """Keyed BLAKE2b, 16 bytes, behind every message of one group of ranks.

    It covers the message, the number of the exchange, the rank that it is from and the rank that it
    is for. The number is not sent: all ranks count alike, since they launch the same exchanges in
    the same order. So a message that was altered, made up, repeated in another exchange, given out
    as another rank's or sent to another one does not verify.

    Args:
        key: 16 to 64 bytes that strangers do not know, for these ranks alone and for no other
            group, before or after: numbers begin at 0 with every object.
        channel: Exchanges that are counted together.
        rank: This one.

    Source: RFC 7693, keyed hashing.
    """

    def __init__(self, key: bytes, channel: str, rank: int) -> None:
        self._hash = hashlib.blake2b(digest_size=PROOF_BYTES, key=key, person=channel.encode())
        self._rank = rank
        self._count = 0

    def next(self) -> int:
        """The number of the next exchange."""
        self._count += 1
        return self._count - 1

    def added(self, message: Tensor, number: int, to: int = ALL_RANKS) -> Tensor:
        """The message, uint8 of one dimension, with its proof behind it, on its device: for the
        rank `to`, for all by default.
        """
        proof = self._proof(message.cpu(), number, self._rank, to)
        end = torch.frombuffer(bytearray(proof), dtype=torch.uint8)
        return torch.cat([message, end.to(message.device)])

    def added_to_each(
        self, messages: Tensor, lengths: Sequence[int], number: int
    ) -> tuple[Tensor, list[int]]:
        """A message to each rank, end to end, with the proofs behind each, and the new lengths."""
        parts = torch.split(messages, list(lengths))
        proven = [self.added(part, number, to) for to, part in enumerate(parts)]
        return torch.cat(proven), [part.numel() for part in proven]

    def checked(self, rows: Tensor, number: int, to: int = ALL_RANKS) -> tuple[Tensor, list[int]]:
        """The messages of all ranks without their proofs, and the ranks whose proof is wrong.

        Args:
            rows: uint8, shape (ranks, B + 16); read only.
            number: Of the exchange, as `to`.
            to: As in `added`.

        Returns:
            Shape (ranks, B), zeros for what did not verify: nobody reads what a stranger wrote.
        """
        here = rows.cpu()
        messages, proofs = here[:, :-PROOF_BYTES], here[:, -PROOF_BYTES:]
        wrong = [
            source
            for source, (message, proof) in enumerate(zip(messages, proofs, strict=True))
            if not hmac.compare_digest(
                proof.numpy().tobytes(), self._proof(message, number, source, to)
            )
        ]
        kept = rows[:, :-PROOF_BYTES].contiguous()
        kept[wrong] = 0
        return kept, wrong

    def _proof(self, message: Tensor, number: int, source: int, to: int) -> bytes:
        made = self._hash.copy()
        made.update(_PLACE.pack(number, source, to))
        made.update(message.contiguous().numpy().data)
        return made.digest()


def unproven(what: str, rank: int) -> str:
    """What is told of a message whose proof is wrong."""
    return (
        f"{what}: what came from rank {rank} was refused, its proof is wrong: a stranger has made, "
        "altered or repeated it on its way"
    )
