"""What becomes of a step, and the steps that are dropped because a gradient is not finite."""

import logging
import warnings
from enum import Enum

from thinwire.errors import NonFinite
from thinwire.exchange.agreement import Answers

__all__ = ["MAX_DROPS_IN_A_ROW", "Drops", "Verdict", "verdict_of"]

MAX_DROPS_IN_A_ROW = 10
_log = logging.getLogger("thinwire")
_ADDED = ", added to those of other ranks,"


class Verdict(Enum):
    """What all ranks make of a step."""

    APPLY = "apply"
    """The update is made."""
    DROP = "drop"
    """A gradient is not finite somewhere."""
    OVERFLOW = "overflow"
    """A loss scaler found such a gradient somewhere."""
    END = "end"
    """No rank has a batch left."""


def verdict_of(answers: Answers) -> Verdict:
    """What follows from the keys `batches` (whether this rank has one), `overflow` (whether a loss
    scaler found one), `non_finite` and `sum_non_finite` (the first parameter whose gradient is not
    finite, of this rank alone or summed over several).
    """
    batches = [batch for _, batch in answers.of("batches")]
    if batches and not any(batches):
        return Verdict.END
    if any(overflow for _, overflow in answers.of("overflow")):
        return Verdict.OVERFLOW
    found = any(True for key in ("non_finite", "sum_non_finite") for _ in answers.of(key))
    return Verdict.DROP if found else Verdict.APPLY


class Drops:
    """Counts dropped steps, warns, and gives up in the end."""

    def __init__(self) -> None:
        self.total = 0
        self.in_a_row = 0
        self.given_up: str | None = None
        """Why this rank cannot go on with steps of its own."""

    def applied(self) -> None:
        """A step was not dropped."""
        self.in_a_row, self.given_up = 0, None

    def overflowed(self) -> None:
        """Count a step that a loss scaler drops, which adapts and gives up by its own rules."""
        self.total += 1

    def dropped(self, step: int, answers: Answers) -> None:
        """Count a step that all ranks drop, and warn.

        Raises:
            NonFinite: The tenth in a row, on every rank.
        """
        culprits = [(*each, "") for each in answers.of("non_finite")]
        culprits += [(*each, _ADDED) for each in answers.of("sum_non_finite")]
        rank, name, added = culprits[0]
        self.total += 1
        text = (
            f"step {step} was dropped on every rank: the gradient of parameter {name} on rank "
            f"{rank}{added} is not finite"
        )
        too_many = self._counted(text)
        if too_many is not None:
            raise NonFinite(too_many)
        _warn(text)

    def dropped_here(self, step: int, name: str) -> None:
        """Count a step that this rank alone drops, for the gradient of parameter `name`, and warn.
        The tenth in a row is `given_up`, for the others to hear.
        """
        self.total += 1
        text = (
            f"local step {step} was dropped on this rank: the gradient of parameter {name} is not "
            "finite"
        )
        self.given_up = self._counted(text)
        _warn(text)

    def _counted(self, text: str) -> str | None:
        """One more in a row, and the text of the error where these are too many."""
        self.in_a_row += 1
        if self.in_a_row < MAX_DROPS_IN_A_ROW:
            return None
        return (
            f"{text}; this was dropped step {self.in_a_row} in a row. Lower the learning rate, "
            "clip gradients, or look at the data of that rank"
        )


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=3)
    _log.warning(text)
