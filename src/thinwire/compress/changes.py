"""The compressions of changes that there are: the one place that a new one is entered."""

from thinwire.compress.change_protocol import ChangeCompression
from thinwire.compress.dgc import DGC
from thinwire.compress.low_rank import LowRank
from thinwire.compress.quantized_change import Quantized
from thinwire.compress.sparse_change import RampedChange, Sparse

__all__ = ["COMPRESSIONS", "Compression", "compression_of"]

Compression = Sparse | Quantized | LowRank
COMPRESSIONS: dict[str, type[Compression]] = {
    "sparse": Sparse,
    "quantized": Quantized,
    "low_rank": LowRank,
}
"""The configs, each a `ChangeCompression` that explains itself, by their tags in strategy files."""


def compression_of(compression: Compression | None, dgc: DGC | None) -> ChangeCompression | None:
    """The one of the two that is given; None where everything travels densely."""
    return RampedChange(dgc) if compression is None and dgc is not None else compression
