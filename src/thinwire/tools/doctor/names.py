"""What a name resolves to; each is asked for once, since silent name servers take long."""

import functools
from typing import NamedTuple

from thinwire._aside import addresses_of

__all__ = ["LOOK_UP_S", "Resolved", "resolved"]

LOOK_UP_S = 4.0
"""For one name. Resolvers begin again with the next server after 5 s, where nobody says else."""


class Resolved(NamedTuple):
    """The addresses of a name."""

    addresses: tuple[str, ...]
    why_not: str
    """Empty where there are addresses."""


@functools.cache
def resolved(host: str) -> Resolved:
    """The addresses of a name, or why there are none; waits `LOOK_UP_S` at most."""
    try:
        return Resolved(addresses_of(host, LOOK_UP_S), "")
    except OSError as error:
        return Resolved((), error.strerror or str(error))
