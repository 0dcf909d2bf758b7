"""Methods of compression, one paper per file, and the tables that register them.

None of them communicates; the packages that exchange import them.
"""

from thinwire.compress.dgc import DGC, locally_clipped
from thinwire.compress.low_rank import LowRank
from thinwire.compress.protocol import ERRORS, ChangeCompression, Compression, OtherRanks
from thinwire.compress.quantized_change import Quantized
from thinwire.compress.sparse_change import Sparse
from thinwire.layout.traffic import DENSE_BUCKETS

__all__ = ["DGC", "LowRank", "Quantized", "Sparse", "locally_clipped"]

GradientConfig = DGC | LowRank
COMPRESSIONS: dict[str, type[GradientConfig]] = {"dgc": DGC, "low_rank": LowRank}
"""The configs of gradient compression by the fields of a strategy."""
OTHER_RANKS: dict[str, OtherRanks] = {
    "residual": "mean_zero",
    "momentum_buffer": "mean_zero",
    "factor": "first",
}
"""Rule for each kind of compressor state when the number of ranks changes."""
ChangeConfig = Sparse | Quantized | LowRank
CHANGE_COMPRESSIONS: dict[str, type[ChangeConfig]] = {
    "sparse": Sparse,
    "quantized": Quantized,
    "low_rank": LowRank,
}
"""The configs that compress changes of local updates, by their tags in strategy files."""
KEPT: dict[str, OtherRanks] = {ERRORS: "mean_zero", "factors": "first"}
"""Rule for each kind of state of a change compression when the number of ranks changes."""


def field_of(compression: object) -> str:
    """Return the field of a strategy that holds this compression, a config or its class.

    >>> field_of(DGC)
    'dgc'
    """
    kind = compression if isinstance(compression, type) else type(compression)
    return next(field for field, known in COMPRESSIONS.items() if issubclass(kind, known))


def buckets_of(compression: Compression | None) -> tuple[int, int]:
    """Return the gradient bytes of the first bucket and of the others; None stands for dense."""
    return DENSE_BUCKETS if compression is None else compression.buckets


def compression_of(
    changes: ChangeConfig | None, of_gradients: GradientConfig | None
) -> ChangeCompression | None:
    """Return the compression of local updates; None if everything travels densely."""
    return changes or of_gradients
