"""Split a model into fragments that are averaged in turn."""

from collections.abc import Mapping

from torch import Tensor

from thinwire.layout.shares import contiguous, strided
from thinwire.local.config import LocalConfig

__all__ = ["fragments_of"]


def fragments_of(params: Mapping[str, Tensor], config: LocalConfig) -> list[list[str]]:
    """Return the names of the parameters of each fragment, in the order of averaging.

    Raises:
        ValueError: There are fewer parameters than fragments.
    """
    names = list(params)
    if config.fragment_order == "strided":
        return strided(names, config.fragments)
    sizes = [p.numel() for p in params.values()]
    return [[names[i] for i in part] for part in contiguous(sizes, config.fragments)]
