"""Message authentication codes (MACs): they prove a message's sender, receiver and exchange."""

import hashlib
import hmac
import struct
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

MAC_BYTES = 16
_HEADER = struct.Struct("<QIi")
ALL_RANKS = -1


@final
class MessageMacs:
    """Keyed BLAKE2b MAC, 16 bytes, appended to every message of one group of ranks."""

    # covers message, exchange, sender and receiver; numbers start at 0: a key is for one group only
    # Source: RFC 7693, keyed hashing.

    def __init__(self, key: bytes, channel: str, rank: int) -> None:
        self._hash = hashlib.blake2b(digest_size=MAC_BYTES, key=key, person=channel.encode())
        self._rank = rank
        self._count = 0

    def next(self) -> int:
        """Count an exchange, and return its number."""
        self._count += 1
        return self._count - 1

    def with_mac(self, message: Tensor, number: int, to: int = ALL_RANKS) -> Tensor:
        """Return the message, uint8 of one dimension, with its MAC appended, on its device."""
        mac = self._mac(message.cpu(), number, self._rank, to)
        end = torch.frombuffer(bytearray(mac), dtype=torch.uint8)
        return torch.cat([message, end.to(message.device)])

    def with_macs(
        self, messages: Tensor, lengths: Sequence[int], number: int
    ) -> tuple[Tensor, list[int]]:
        """Return the messages for each rank, end to end, each with its MAC, and the new lengths."""
        parts = torch.split(messages, list(lengths))
        authenticated = [self.with_mac(part, number, to) for to, part in enumerate(parts)]
        return torch.cat(authenticated), [part.numel() for part in authenticated]

    def verified(self, rows: Tensor, number: int, to: int = ALL_RANKS) -> tuple[Tensor, list[int]]:
        """Return the messages of all ranks without their MACs, and the ranks whose MAC is wrong."""
        # zeros for messages that did not verify, so that forged bytes are never used
        on_cpu = rows.cpu()
        messages = on_cpu[:, :-MAC_BYTES]
        macs = on_cpu[:, -MAC_BYTES:]
        wrong = [
            source
            for source, (message, mac) in enumerate(zip(messages, macs, strict=True))
            if not hmac.compare_digest(
                mac.numpy().tobytes(), self._mac(message, number, source, to)
            )
        ]
        kept = rows[:, :-MAC_BYTES].contiguous()
        kept[wrong] = 0
        return kept, wrong

    def _mac(self, message: Tensor, number: int, source: int, to: int) -> bytes:
        digest = self._hash.copy()
        digest.update(_HEADER.pack(number, source, to))
        digest.update(message.contiguous().numpy().data)
        return digest.digest()


def wrong_mac_text(action: str, rank: int) -> str:
    """Return the text about a message whose MAC is wrong."""
    return (
        f"{action}: the message from rank {rank} was refused because its MAC is wrong. A stranger "
        "has made, altered or replayed it"
    )
