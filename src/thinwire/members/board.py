"""What members tell each other at the store of a run: plain values under keys."""

import json
import logging
from typing import Any

from thinwire.errors import PayloadCorrupt
from thinwire.members.sealed import SealedStore

__all__ = ["Board"]

_log = logging.getLogger("thinwire")
Value = Any
"""What JSON holds."""
_NOTHING = "null"
"""What a store gives back that was to replace it by itself, where there is no value."""


class Board:
    """Values as JSON under the keys of one run, over one connection.

    Every call waits for the host, or raises `RuntimeError` where it does not answer within the
    time-out of the store. Use one for each thread.

    Raises:
        PayloadCorrupt: A value was written by a stranger.
    """

    def __init__(self, store: SealedStore) -> None:
        self.store = store
        self._told: set[str] = set()

    def clone(self) -> "Board":
        """The same over a connection of its own."""
        return Board(self.store.clone())

    def put(self, key: str, value: Value) -> None:
        """Write, over what was there."""
        self.store.set(key, json.dumps(value))

    def first(self, key: str, value: Value) -> Value:
        """Write unless something is there already.

        Returns:
            What is there now, the same to all who ask.
        """
        return json.loads(self.store.compare_set(key, "", json.dumps(value)))

    def get(self, key: str) -> Value:
        """What is there; None where nothing is."""
        # one way there and back, where `check` and `get` take three
        return json.loads(self.store.compare_set(key, _NOTHING, _NOTHING))

    def has(self, key: str) -> bool:
        """Whether a member has written something there; what a stranger wrote does not count."""
        try:
            return self.get(key) is not None
        except PayloadCorrupt as error:
            if key not in self._told:
                self._told.add(key)
                _log.warning("%s", error)
            return False
