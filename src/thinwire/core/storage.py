"""Whose memory a tensor lives in."""

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, strided

__all__ = ["with_own_storage"]

_Key = TypeVar("_Key")


def with_own_storage(tensors: Mapping[_Key, Tensor]) -> set[_Key]:
    """The keys of dense tensors that share no storage with another one of these, and may be written
    to on their own.

    Autograd gives two parameters views of one gradient where both enter a sum through views.
    """
    places = {
        key: x.untyped_storage().data_ptr() for key, x in tensors.items() if x.layout is strided
    }
    count = Counter(places.values())
    return {key for key, place in places.items() if count[place] == 1}
