"""Bytes from one member to another one, directly or through a relay."""

import datetime

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from thinwire.comm.direct import Direct
from thinwire.comm.failures import explain_failure
from thinwire.comm.private import forget, hold
from thinwire.comm.relay import RelayPlace
from thinwire.comm.relayed import Relayed
from thinwire.errors import PeerLost, PeerStalled

__all__ = ["Line", "ways_between"]

_PIECE_BYTES = 4 << 20


def ways_between(
    store: Store, rank: int, size: int, timeout_s: float, way: str | RelayPlace
) -> Direct:
    """The process groups of ranks that met at a store, see `Direct`; `way` is the address of this
    machine, on which others reach it, or the relay.
    """
    kind = Relayed if isinstance(way, RelayPlace) else Direct
    return kind(store, rank, size, timeout_s, way)


class Line:
    """Bytes from one process to another one, in order, in pieces that each have the time-out.

    Args:
        store: Where the two find each other; one that was never used for this.
        giver: Whether this is the process that sends.
        timeout_s: For the making, and for each piece of at most 4 MiB.
        way: See `ways_between`.

    Raises:
        PeerLost, PeerStalled: The other one died, or did not come within the time-out.
    """

    def __init__(
        self, store: Store, *, giver: bool, timeout_s: float, way: str | RelayPlace
    ) -> None:
        self._ends = ways_between(store, 0 if giver else 1, 2, timeout_s, way)
        self._timeout_s = timeout_s
        self._other = 1 if giver else 0

    def send(self, content: bytes | bytearray | memoryview) -> None:
        """Send bytes whose number the other one learns first."""
        self._pass(torch.tensor([len(content)], dtype=torch.int64, device="cpu"), give=True)
        whole = torch.frombuffer(bytearray(content), dtype=torch.uint8) if len(content) else None
        for piece in () if whole is None else torch.split(whole, _PIECE_BYTES):
            self._pass(piece, give=True)

    def receive(self, at_most: int) -> bytearray:
        """The bytes that the other one sent.

        Raises:
            PeerLost: It claims to send more than `at_most`: it is none of ours.
        """
        length = torch.empty(1, dtype=torch.int64, device="cpu")
        self._pass(length, give=False)
        nbytes = int(length)
        if not 0 <= nbytes <= at_most:
            raise PeerLost(
                f"the member that gives its state claims to send {nbytes} bytes, and at most "
                f"{at_most} can be right: its message is damaged"
            )
        content = bytearray(nbytes)
        whole = torch.frombuffer(content, dtype=torch.uint8) if nbytes else None
        for piece in () if whole is None else torch.split(whole, _PIECE_BYTES):
            self._pass(piece, give=False)
        return content

    def _pass(self, piece: Tensor, *, give: bool) -> None:
        group = self._ends.group
        assert group is not None, "open"
        try:
            work = (group.send if give else group.recv)([piece], self._other, 0)
            hold(group, work, [piece])
            work.wait(datetime.timedelta(seconds=self._timeout_s))
            forget(work)
        except RuntimeError as error:
            self.close()
            what, within = "copying the state of a member", f"{self._timeout_s:g} s"
            told = explain_failure(error, what=what, rank=1 - self._other, size=2, within=within)
            if isinstance(told, PeerLost | PeerStalled):
                raise told from error
            raise PeerLost(str(told)) from error

    def close(self) -> None:
        """Hang up."""
        self._ends.release()
