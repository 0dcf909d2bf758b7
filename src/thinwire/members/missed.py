"""Rounds that this member was late for, from a member that has them."""

import logging
import time

from thinwire.errors import PeerLost, PeerStalled
from thinwire.members.membership import Membership
from thinwire.members.transfer import (
    Download,
    StateMessage,
    TransferContext,
    offer_key,
    wanted_key,
)
from thinwire.members.watcher import POLL_S

_log = logging.getLogger("thinwire")


class MissedRounds:
    """Rounds that this member is late for, from a member that has them."""

    def __init__(self) -> None:
        self._download: Download | None = None
        self._offers: set[int] = set()
        """Numbers of the transfers so far."""

    def next(
        self, membership: Membership, context: TransferContext, after: int, max_bytes: int
    ) -> StateMessage:
        """Return the next round after number `after`."""
        while True:
            if self._download is None:
                sender, number = self._offered(membership, context)
                context.kv.put(wanted_key(number), True)

                def is_there(sender: str = sender) -> bool:
                    return sender in membership.current().ids

                self._download = Download(context, number, max_bytes, is_there=is_there)
            try:
                update = self._download.next(wait=True)
            except PeerLost as error:
                _log.warning("asking another member for the averagings that it missed: %s", error)
                self.close()
                continue
            assert update is not None, "waited for"
            if update.plain["made"]["averaging"] > after:
                return update

    def _offered(self, membership: Membership, context: TransferContext) -> tuple[str, int]:
        """Wait until a member sends the rounds; return it, and the number of the transfer."""
        until = time.monotonic() + context.timeout_s
        since = 0
        key = offer_key(membership.own_id)
        while time.monotonic() < until:
            membership.current()
            since, (offer,) = context.kv.look([key], POLL_S, since)
            if offer is not None and offer["number"] not in self._offers:
                self._offers.add(offer["number"])
                return offer["by"], offer["number"]
        raise PeerStalled("no member sends the averagings that this one was late for")

    def close(self) -> None:
        """End the transfer."""
        if self._download is not None:
            self._download.close()
        self._download = None
