"""The errors that thinwire raises at run time, one family, every one of them a `RuntimeError`.

Wrong arguments are `TypeError` and `ValueError` as everywhere in Python; this file is for what goes wrong later.
"""

__all__ = [
    "Mismatch",
    "NonFinite",
    "PayloadCorrupt",
    "PeerLost",
    "PeerStalled",
    "ThinwireError",
]


class ThinwireError(RuntimeError):
    """Base of the run-time errors of this library."""


class PeerLost(ThinwireError):
    """A rank closed its connection: it died, or left after an error of its own."""


class PeerStalled(ThinwireError):
    """A rank did not take part in an exchange within the time-out."""


class Mismatch(ThinwireError):
    """Two ranks disagree: on versions, configuration, parameters or on what is exchanged in this step."""


class PayloadCorrupt(ThinwireError):
    """A message is damaged, or belongs to another step or layout. Names the rank it came from; nothing was applied."""


class NonFinite(ThinwireError):
    """Too many steps in a row were dropped because of gradients that are not finite."""
