"""How much of a parameter's change travels at an averaging, and how."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from thinwire.core.select import count_sent
from thinwire.sync.dgc_config import DGC
from thinwire.sync.local_config import Sparse

__all__ = ["ChangeRule", "change_rule"]


@dataclass(frozen=True, slots=True)
class ChangeRule:
    """What an averaging asks about compression; the same on all ranks."""

    value_bits: int
    """What one sent value costs."""
    decay: float
    """What of a kept error counts at the next averaging."""
    compresses: Callable[[Tensor], bool]
    """Whether a parameter's change is ever compressed, so that it has an error."""
    count_at: Callable[[int, int], int | None]
    """Entries sent after local step s (from 1) of a change of n elements; None: all of them, densely."""


def change_rule(compression: Sparse | None, dgc: DGC | None) -> ChangeRule:
    """The rule of one of the two configs, or of neither, by which everything travels densely."""
    if compression is not None:
        sparsity = compression.sparsity
        return ChangeRule(
            compression.value_bits, compression.decay, lambda _: True, lambda _, numel: count_sent(numel, sparsity)
        )
    if dgc is not None:
        return ChangeRule(dgc.value_bits, 1.0, dgc.compresses, lambda step, numel: dgc.count_at(step - 1, numel))
    return ChangeRule(32, 1.0, lambda _: False, lambda _step, _numel: None)
