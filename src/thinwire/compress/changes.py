"""The compressions of changes that there are: the one place that a new one is entered."""

from thinwire.compress.change_protocol import ChangeCompression, ForChanges
from thinwire.compress.low_rank import LowRank
from thinwire.compress.quantized_change import Quantized
from thinwire.compress.sparse_change import Sparse

__all__ = ["COMPRESSIONS", "Compression", "compression_of"]

Compression = Sparse | Quantized | LowRank
COMPRESSIONS: dict[str, type[Compression]] = {
    "sparse": Sparse,
    "quantized": Quantized,
    "low_rank": LowRank,
}
"""The configs by their tags in strategy files."""


def compression_of(
    compression: Compression | None, of_gradients: ForChanges | None
) -> ChangeCompression | None:
    """What compresses the changes: the first of the two that is given; None where everything
    travels densely.
    """
    if compression is None and of_gradients is not None:
        return of_gradients.for_changes()
    return compression
