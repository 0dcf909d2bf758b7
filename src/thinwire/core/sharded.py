"""Parameters that are sharded over ranks, and this rank's part of them.

`torch.distributed.fsdp.fully_shard` replaces each parameter by a `DTensor`. This rank's shard is a
plain tensor inside it. It may be replaced when the model is first used, so it is always looked up
again.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.core.several import all_of

_PLAIN = (Tensor, torch.nn.Parameter)


def is_sharded(tensor: Tensor) -> bool:
    """Return True for a `DTensor`."""
    # called for every tensor of every step: a class test is faster than a missing attribute
    return type(tensor) not in _PLAIN and hasattr(tensor, "to_local")


def shard_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, sharing memory; any other tensor itself."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # otherwise it would be a new tensor with its own gradient
        shard: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return shard


def whole_of(tensor: Tensor) -> Tensor:
    """Return a sharded tensor as a whole, which all its ranks call; any other tensor itself."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def sharded_like(shard: Tensor, param: Tensor) -> Tensor:
    """Return a tensor sharded as `param` with the local part `shard`."""
    if not is_sharded(param) or is_sharded(shard):
        return shard
    whole: Tensor = type(param).from_local(  # type: ignore[attr-defined]
        shard,
        param.device_mesh,  # type: ignore[attr-defined]
        param.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    return whole


def require_shards(params: Mapping[str, Tensor], mesh: Any) -> None:
    """Raise unless all parameters are sharded over this mesh of a site; none of them with None."""
    for name, param in params.items():
        if mesh is None:
            if is_sharded(param):
                raise ValueError(
                    f"parameter {name} is sharded over ranks ({_placed(param)}), but no mesh was "
                    "given: shard the model with fully_shard(model, mesh=mesh['shard']) and pass "
                    "mesh=mesh, so that each rank exchanges its own shards"
                )
            continue
        if not is_sharded(param):
            raise ValueError(
                f"mesh was given, but parameter {name} is not sharded: call fully_shard(model, "
                "mesh=mesh['shard']) on the whole model before creating the optimizer"
            )
        placements = param.placements  # type: ignore[attr-defined]
        here = param.device_mesh  # type: ignore[attr-defined]
        if here != mesh or len(placements) != 1 or not placements[0].is_shard(0):
            raise ValueError(
                f"parameter {name} has placements {_placed(param)}, but only Shard(0) on the mesh "
                "dimension 'shard' is supported: call fully_shard(model, mesh=mesh['shard']). "
                "With both mesh dimensions, torch itself averages over the sites in every "
                "backward pass"
            )


def require_elementwise(optimizer: Any) -> None:
    """Raise for an optimizer of torch that needs whole matrices."""
    for opt in all_of(optimizer):
        names = {kind.__name__ for kind in type(opt).__mro__}
        if not names & {"Muon", "Adafactor"} or getattr(opt, "takes_shards", False):
            continue
        raise ValueError(
            f"optimizer is {type(opt).__name__}, whose update needs whole matrices, but each rank "
            "has only some rows: with mesh=, give thinwire.optim.Muon, which gathers them, or an "
            "elementwise optimizer such as AdamW"
        )


def _placed(param: Tensor) -> str:
    placements = param.placements  # type: ignore[attr-defined]
    here = param.device_mesh  # type: ignore[attr-defined]
    kinds = ", ".join(str(placement) for placement in placements)
    return f"({kinds}) on the mesh {here.mesh_dim_names} {tuple(here.shape)}"


def reshard_(model: torch.nn.Module) -> None:
    """Free whole parameters that a forward pass has kept: they are outdated after an update."""
    for module in model.modules():
        reshard = getattr(module, "reshard", None)
        if reshard is not None and hasattr(module, "unshard"):
            reshard()


class Shards(Mapping[str, Tensor]):
    """This rank's part of each parameter, by name: the tensors that are exchanged."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params = params

    def __getitem__(self, name: str) -> Tensor:
        return shard_of(self._params[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)
