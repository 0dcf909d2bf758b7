"""Methods of compression, one paper in one file; none of them speaks to other ranks itself."""

from thinwire.compress.dense import Dense
from thinwire.compress.dgc import DGC, DGCCompressor
from thinwire.compress.low_rank import LowRank, LowRankCompressor
from thinwire.compress.protocol import Compressor, OtherRanks

__all__ = [
    "COMPRESSIONS",
    "DGC",
    "OTHER_RANKS",
    "Compressor",
    "DGCCompressor",
    "Dense",
    "LowRank",
    "LowRankCompressor",
]

COMPRESSIONS: tuple[type[DGC] | type[LowRank], ...] = (DGC, LowRank)
"""The configs of gradient compression, each a field of a strategy."""
OTHER_RANKS: dict[str, OtherRanks] = {
    kind: rule
    for method in (DGCCompressor, LowRankCompressor)
    for kind, rule in method.other_ranks.items()
}
"""What state becomes on another number of ranks, by kind."""
