"""Byte strings from one member to another, directly or through a relay."""

import datetime

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from thinwire.comm.failures import explain_failure
from thinwire.comm.member_groups import MemberGroups
from thinwire.comm.private import forget, keep_alive
from thinwire.comm.relay import RelayEndpoint
from thinwire.errors import PeerLost, PeerStalled

_PIECE_BYTES = 4 << 20


class Channel:
    """Sends byte strings from one process to another, in order."""

    def __init__(
        self, store: Store, *, sending: bool, timeout_s: float, endpoint: RelayEndpoint
    ) -> None:
        self._groups = MemberGroups(store, 0 if sending else 1, 2, timeout_s, endpoint)
        self._timeout_s = timeout_s
        self._other = 1 if sending else 0

    def send(self, content: bytes | bytearray | memoryview) -> None:
        """Send the number of bytes, and then the bytes."""
        self._transfer(torch.tensor([len(content)], dtype=torch.int64, device="cpu"), sending=True)
        whole = torch.frombuffer(bytearray(content), dtype=torch.uint8) if len(content) else None
        for piece in () if whole is None else torch.split(whole, _PIECE_BYTES):
            self._transfer(piece, sending=True)

    def receive(self, max_bytes: int) -> bytearray:
        """Return the next byte string."""
        length = torch.empty(1, dtype=torch.int64, device="cpu")
        self._transfer(length, sending=False)
        nbytes = int(length)
        if not 0 <= nbytes <= max_bytes:
            raise PeerLost(
                f"the member that sends its state announces {nbytes} bytes, more than the limit of "
                f"{max_bytes}: its message is damaged"
            )
        content = bytearray(nbytes)
        whole = torch.frombuffer(content, dtype=torch.uint8) if nbytes else None
        for piece in () if whole is None else torch.split(whole, _PIECE_BYTES):
            self._transfer(piece, sending=False)
        return content

    def _transfer(self, piece: Tensor, *, sending: bool) -> None:
        group = self._groups.group
        assert group is not None, "open"
        try:
            work = (group.send if sending else group.recv)([piece], self._other, 0)
            keep_alive(group, work, [piece])
            work.wait(datetime.timedelta(seconds=self._timeout_s))
            forget(work)
        except RuntimeError as error:
            self.close()
            exchange, within = "copying the state of a member", f"{self._timeout_s:g} s"
            explained = explain_failure(
                error, action=exchange, rank=1 - self._other, size=2, within=within
            )
            if isinstance(explained, PeerLost | PeerStalled):
                raise explained from error
            raise PeerLost(str(explained)) from error

    def close(self) -> None:
        """Close the connections."""
        self._groups.release()
