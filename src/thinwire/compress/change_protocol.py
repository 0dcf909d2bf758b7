"""What a compression of changes tells those who average: pure functions of tensors, no word of
ranks.

A new one is a file with a config that has these methods, and a line in `compress.changes`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from thinwire.compress.protocol import Arrived, Context, Sending
from thinwire.kernels.needs import Need

__all__ = [
    "ERRORS",
    "ChangeCompression",
    "ErrorsOnly",
    "ForChanges",
    "Kept",
    "MeanChange",
    "Rule",
]

Rule: TypeAlias = Literal["mean", "mean_zero", "first"]
"""What state becomes on another number of ranks; see `checkpoint.combine`."""
Kept: TypeAlias = Mapping[str, Mapping[str, Tensor]]
"""State by kind and name of the parameter."""
ERRORS = "errors"
"""The kind of state that there is always: what of a change was not sent, of this rank alone."""


class MeanChange(Arrived):
    """What has arrived of the changes and is in order, before anything is applied."""

    def take_mean_(self, name: str, folded: Tensor, kept: Kept) -> Tensor:
        """The mean change of one parameter; changes `kept`: what this rank did not send is its
        error.

        Args:
            name: Of the parameter.
            folded: What this rank had to send; read only.
            kept: The state; an error has shape and dtype of `folded`, contiguous, and becomes
                `folded` less what this rank sent. Of this parameter only.

        Returns:
            A new tensor like `folded`; the same bits on all ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} must define take_mean_")


class ChangeCompression(Protocol):
    """What of the changes of parameters travels at an averaging, and what is kept; the same on all
    ranks.

    What is folded is e <- decay * e + change, with an error e per parameter; what of it is not sent
    becomes e. Steps are local steps, from 1.
    """

    kept: ClassVar[Mapping[str, Rule]]
    """The kinds of its state, `ERRORS` among them, and what each becomes on another number of
    ranks."""

    @property
    def decay(self) -> float:
        """What of a kept error counts at the next averaging, in [0, 1]."""

    @property
    def conserves(self) -> bool:
        """Whether the mean over the ranks of all that was changed is applied in time: none lost,
        none counted twice.
        """

    @property
    def steady_share(self) -> float | None:
        """About which part of a change that repeats itself at every averaging is applied at least,
        with an outer rate of 1 and no outer momentum; None where that depends on what is sent.
        """

    def explained(self) -> str:
        """Its line of `explain`: what happens to each tensor's change."""

    def compresses(self, param: Tensor) -> bool:
        """Whether a parameter's change is ever compressed, so that it has an error."""

    def begin(self, anchor: Tensor) -> dict[str, Tensor]:
        """The state of a parameter at the start, by kind; an error is zeros like the anchor."""

    def takes(self, step: int, numel: int) -> bool:
        """Whether a change of so many entries, of such a parameter, is compressed after local step
        `step`.
        """

    def send(self, context: Context, folded: Mapping[str, Tensor], kept: Kept) -> Sending:
        """The collectives of one averaging, which return a `MeanChange`.

        Args:
            context: Its step is a local step, from 1, for the headers of messages.
            folded: By name what this rank has to send, contiguous, float32 or float64, finite; read
                only. All names are taken at this step, at least one, in the same order on all
                ranks.
            kept: The state; read only.
        """

    def sent_bytes(
        self, step: int, shapes: Sequence[torch.Size], sources: int = 2, source: int = 0
    ) -> int:
        """What rank `source` of `sources` gives to the collectives of `send` for float32, exactly,
        headers included.
        """

    def sparsity_at(self, step: int) -> float:
        """Fraction of a compressed change that the averaging after `step` leaves out; 0 where
        nothing is.
        """

    def needs(self, params: Sequence[Tensor]) -> frozenset[Need]:
        """The compiled loops that `send` calls for these parameters."""


class ForChanges(Protocol):
    """A compression of gradients, a field of a strategy, that knows the changes of local updates
    too.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    field: ClassVar[str]

    def for_changes(self) -> ChangeCompression:
        """What becomes of them.

        Raises:
            ValueError: A setting that is for gradients only.
        """


class ErrorsOnly:
    """For those whose state is the errors alone."""

    kept: ClassVar[Mapping[str, Rule]] = {ERRORS: "mean_zero"}

    def begin(self, anchor: Tensor) -> dict[str, Tensor]:
        """See `ChangeCompression`."""
        return {ERRORS: torch.zeros_like(anchor)}
