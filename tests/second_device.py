"""A device that this machine has not: host memory behind a class that computes with no other."""

from typing import Any

import torch
from torch import Tensor

from tests.allocations import Allocations, changed, tensors_in

DEVICE = torch.device("meta")
_MOVES = ("aten::copy_", "aten::_to_copy")


class There(Tensor):
    """A tensor on `DEVICE`."""

    content: Tensor

    @staticmethod
    def __new__(cls, content: Tensor) -> "There":
        found: There = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            content.shape,
            strides=content.stride(),
            storage_offset=content.storage_offset(),
            dtype=content.dtype,
            device=DEVICE,
        )
        found.content = content.detach()
        return found

    def tolist(self) -> Any:
        return self.content.tolist()

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(function, args, kwargs or {})


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = list(tensors_in((args, kwargs)))
    there = [t for t in tensors if isinstance(t, There)]
    name, asked = function._schema.name, kwargs.get("device")
    if not there and asked is None:  # collectives among them
        return function(*args, **kwargs)
    if there and name not in _MOVES:
        mixed = [t for t in tensors if not isinstance(t, There) and t.dim()]
        if mixed:
            raise RuntimeError(f"{name}: a tensor of shape {tuple(mixed[0].shape)} is on the CPU")
    goes = bool(there) if asked is None else torch.device(asked) == DEVICE
    if asked is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    plain_args, plain = changed((args, kwargs), lambda t: getattr(t, "content", t))
    result = function(*plain_args, **plain)
    if name.endswith("_") and not name.endswith("__") and isinstance(args[0], Tensor):
        return args[0]
    if "out" in kwargs:
        return kwargs["out"]
    return changed(result, There) if goes else result


class Held(Allocations):
    """Makes `DEVICE` known to factories, and counts the bytes that new tensors hold there."""

    def run(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return _run(function, args, kwargs)

    def storages(self, tree: Any) -> list[torch.UntypedStorage]:
        there = [tensor for tensor in tensors_in(tree) if isinstance(tensor, There)]
        return [tensor.content.untyped_storage() for tensor in there]
