"""Methods of compression, one paper in one file, and the tables in which a new one is entered; none
speaks to other ranks, and what exchanges imports them.
"""

from thinwire.compress.dgc import DGC
from thinwire.compress.low_rank import LowRank
from thinwire.compress.protocol import ERRORS, ChangeCompression, OtherRanks
from thinwire.compress.quantized_change import Quantized
from thinwire.compress.sparse_change import Sparse
from thinwire.layout.traffic import BUCKET_BYTES, BUCKETS, FIRST_BUCKET_BYTES

__all__ = [
    "CHANGE_COMPRESSIONS",
    "COMPRESSIONS",
    "KEPT",
    "OTHER_RANKS",
    "ChangeConfig",
    "buckets_of",
    "compression_of",
    "field_of",
]

COMPRESSIONS: dict[str, type[DGC] | type[LowRank]] = {"dgc": DGC, "low_rank": LowRank}
"""The configs of gradient compression by the fields of a strategy."""
OTHER_RANKS: dict[str, OtherRanks] = {
    "residual": "mean_zero",
    "momentum_buffer": "mean_zero",
    "factor": "first",
}
"""What the state of compressors becomes on another number of ranks, by kind."""
ChangeConfig = Sparse | Quantized | LowRank
CHANGE_COMPRESSIONS: dict[str, type[ChangeConfig]] = {
    "sparse": Sparse,
    "quantized": Quantized,
    "low_rank": LowRank,
}
"""The configs that compress changes of local updates, by their tags in strategy files."""
KEPT: dict[str, OtherRanks] = {ERRORS: "mean_zero", "factors": "first"}
"""What their state becomes on another number of ranks, by kind."""


def field_of(compression: object) -> str:
    """The field of a strategy that says this compression, a config or its class."""
    kind = compression if isinstance(compression, type) else type(compression)
    return next(field for field, each in COMPRESSIONS.items() if issubclass(kind, each))


def buckets_of(compression: object) -> tuple[int, int]:
    """Gradient bytes of the first bucket and of others, of a config or its class; None: dense."""
    field = None if compression is None else field_of(compression)
    return BUCKETS.get(field, (FIRST_BUCKET_BYTES, BUCKET_BYTES))


def compression_of(
    changes: ChangeConfig | None, of_gradients: DGC | LowRank | None
) -> ChangeCompression | None:
    """What compresses the changes of local updates: the first of the two that is given; None where
    everything travels densely.

    Raises:
        ValueError: A setting that is for gradients only.
    """
    if changes is None and isinstance(of_gradients, DGC) and of_gradients.state_dtype == "bfloat16":
        raise ValueError(
            "dgc.state_dtype is 'bfloat16', but what an averaging does not send is kept in "
            "the type of its anchor: leave state_dtype out"
        )
    return changes or of_gradients
