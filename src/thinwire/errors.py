"""The errors that thinwire raises at run time, one family, every one of them a `RuntimeError`.

Wrong arguments are `TypeError` and `ValueError` as everywhere in Python. The one exception here is
`StrategyError`, a `ValueError` for a strategy that cannot be; all others are for what goes wrong
later.
"""

__all__ = [
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointMissing",
    "Diverged",
    "Evicted",
    "Mismatch",
    "NonFinite",
    "PayloadCorrupt",
    "PeerLost",
    "PeerStalled",
    "QuorumLost",
    "StrategyError",
    "ThinwireError",
]


class ThinwireError(RuntimeError):
    """Base of the run-time errors of this library."""


class PeerLost(ThinwireError):
    """A rank closed its connection: it died, or left after an error of its own."""


class PeerStalled(ThinwireError):
    """A rank did not take part in an exchange within the time-out."""


class QuorumLost(ThinwireError):
    """Too few members are left to go on: fewer than `min_members`, or not more than half of the
    last generation.
    """


class Evicted(ThinwireError):
    """The other members went on without this one, which was away for too long."""


class Mismatch(ThinwireError):
    """Two ranks disagree: on versions, configuration, parameters or on what is exchanged in this
    step.
    """


class Diverged(ThinwireError):
    """What ranks must hold alike differs.

    Names the first parameter and the updates between which it happened.
    """


class PayloadCorrupt(ThinwireError):
    """A message is damaged, or belongs to another step or layout.

    Names the rank it came from; nothing was applied.
    """


class NonFinite(ThinwireError):
    """Too many steps in a row were dropped because of gradients that are not finite."""


class CheckpointError(ThinwireError):
    """A checkpoint cannot be written, or there is none that can be loaded.

    Raised on every rank, with the cause.
    """


class CheckpointCorrupt(CheckpointError):
    """A file of a checkpoint is damaged, missing or of another checkpoint; names the file."""


class CheckpointMissing(CheckpointError):
    """There is no checkpoint in the directory yet, not even a damaged one."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint is whole and belongs to something else: another strategy, model, optimizer or
    pipeline.
    """


class StrategyError(ValueError):
    """Parts of a strategy do not go together, or not with this model, optimizer or number of ranks;
    lists all of it.
    """
