"""Methods of compression, one paper per file, and the tables that register them.

None of them communicates; the packages that exchange import them.
"""

from thinwire.compress.dgc import DGC, locally_clipped
from thinwire.compress.low_rank import LowRank
from thinwire.compress.protocol import Compression, OtherRanks
from thinwire.compress.quantized_change import Quantized
from thinwire.compress.sparse_change import Sparse

__all__ = ["DGC", "LowRank", "Quantized", "Sparse", "locally_clipped"]

COMPRESSIONS: dict[str, type[Compression]] = {
    "dgc": DGC,
    "low_rank": LowRank,
    "sparse": Sparse,
    "quantized": Quantized,
}
"""The methods, by their tags in strategy files. A new one is a file and a line here."""


def kinds_of_state() -> dict[str, OtherRanks]:
    """Return the rule for each kind of state when the number of ranks changes."""
    return {kind: rule for one in COMPRESSIONS.values() for kind, rule in one.kinds.items()}


def tag_of(compression: object) -> str:
    """Return the tag of a compression, a config or its class.

    >>> tag_of(DGC)
    'dgc'
    """
    kind = compression if isinstance(compression, type) else type(compression)
    return next(tag for tag, known in COMPRESSIONS.items() if issubclass(kind, known))
