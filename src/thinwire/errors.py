"""Run-time errors of thinwire: one family, all of them subclasses of `RuntimeError`.

Wrong arguments are `TypeError` and `ValueError` as everywhere in Python. The one exception here is
`StrategyError`, a `ValueError` for an invalid strategy. All others report failures at run time.
"""

__all__ = [
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointMissing",
    "Diverged",
    "Evicted",
    "LineTooSlow",
    "Mismatch",
    "NonFinite",
    "PayloadCorrupt",
    "PeerLost",
    "PeerStalled",
    "QuorumLost",
    "StrategyError",
    "StreamError",
    "ThinwireError",
]


class ThinwireError(RuntimeError):
    """Base of the run-time errors of this library.

    Example::

        try:
            engine.train_step(inputs, targets)
        except tw.ThinwireError as error:
            log.error("%s", error)
            raise SystemExit(1)
    """


class PeerLost(ThinwireError):
    """A rank closed its connection: it died, or left after an error of its own."""


class PeerStalled(ThinwireError):
    """A rank did not take part in an exchange within the time-out."""


class QuorumLost(ThinwireError):
    """Fewer members than `min_members` are left to continue."""


class Evicted(ThinwireError):
    """The other members continued without this one, which was away for too long."""


class LineTooSlow(ThinwireError):
    """A joiner receives less than the rounds of the run send: it would never catch up."""


class Mismatch(ThinwireError):
    """Ranks disagree on versions, configuration, parameters or the content of this exchange."""


class Diverged(ThinwireError):
    """Values that must be equal on all ranks differ.

    Example::

        try:
            sync.require_equal()
        except tw.Diverged as error:
            print(error)

    Names the first parameter that differs and the updates between which it happened.
    """


class PayloadCorrupt(ThinwireError):
    """A message is damaged, or belongs to another step or layout.

    Names the sender; nothing was applied.
    """


class NonFinite(ThinwireError):
    """Too many steps in a row were dropped because of gradients that are not finite."""


class CheckpointError(ThinwireError):
    """A checkpoint cannot be written, or no checkpoint can be loaded.

    Raised on every rank, with the cause.
    """


class CheckpointCorrupt(CheckpointError):
    """A file of a checkpoint is damaged, missing or from another checkpoint; names the file."""


class CheckpointMissing(CheckpointError):
    """The directory has no checkpoint yet, not even a damaged one.

    Example::

        try:
            engine.load("checkpoints")
        except tw.CheckpointMissing:
            pass  # the first start
    """


class CheckpointMismatch(CheckpointError):
    """A checkpoint is intact but belongs to another strategy, model, optimizer or pipeline."""


class StreamError(ThinwireError):
    """Versions of a model cannot be published or followed: a file is missing, damaged or forged, or
    the token is another.
    """


class StrategyError(ValueError):
    """Fields of a strategy conflict with each other or with the model, optimizer or ranks.

    The message lists every conflict.

    >>> import thinwire as tw
    >>> tw.DistributedStrategy(lars=tw.LARS(), lamb=tw.LAMB())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    thinwire.errors.StrategyError: ...
    """
