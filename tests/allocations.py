"""Bytes of the tensors that operations of torch make."""

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Tensors of arguments or results: a tenth of the time of torch's own trees."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list, dict)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(item)


class Allocations(TorchDispatchMode):
    """Counts the bytes of new tensors larger than `above`: all, and the most held at a time."""

    def __init__(self, above: int = 0) -> None:
        super().__init__()
        self.above = above
        self.live: dict[int, int] = {}
        self.total = self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        result = function(*args, **kwargs or {})
        for storage in [tensor.untyped_storage() for tensor in tensors_in(result)]:
            key, nbytes = storage._cdata, storage.nbytes()
            if key not in given and key not in self.live and nbytes > self.above:
                self.live[key] = nbytes
                self.total += nbytes
                self.peak = max(self.peak, sum(self.live.values()))
                weakref.finalize(storage, self.live.pop, key, None)
        return result
