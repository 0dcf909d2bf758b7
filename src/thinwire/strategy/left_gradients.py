"""Gradients that are changed after the update was made from them, which has no effect."""

import warnings
from collections.abc import Mapping

from torch import Tensor
from torch.nn import Parameter

from thinwire.core.rows import coalesced, values_of
from thinwire.core.sharded import shard_of

__all__ = ["LeftGradients"]


class LeftGradients:
    """Remembers what an update left in `p.grad`, and warns, once, where it is another at the next
    one.

    Clearing gradients is no such change, in place or not.
    """

    def __init__(self, params: Mapping[str, Parameter]) -> None:
        self._params = params
        self._seen: dict[str, tuple[int, int]] = {}
        self._warned = False

    def remember(self) -> None:
        """What is there now is what was left."""
        if self._warned:
            return
        # an identity and no reference: what the user drops must be freed
        present = ((name, p.grad) for name, p in self._params.items() if p.grad is not None)
        self._seen = {name: (id(grad), grad._version) for name, grad in present}

    def look(self) -> None:
        """Before gradients are cleared for the next backward pass."""
        if self._warned:
            return
        for name, param in self._params.items():
            grad = param.grad
            if grad is None or self._seen.get(name, (None, 0)) == (id(grad), grad._version):
                continue
            if name in self._seen and bool(_entries(grad).any()):
                self._warned = True
                warnings.warn(
                    f"the gradient of {name} was changed after engine.minimize or train_step had "
                    "made the update from it, which has no effect: clip by prepare(..., "
                    "grad_clip=ClipByGlobalNorm(...)) instead of clip_grad_norm_, and give every "
                    "loss to the engine instead of calling its backward(); "
                    "gradient_merge=GradientMerge(k_steps) adds up several",
                    UserWarning,
                    stacklevel=4,
                )
                break
        self._seen = {}


def _entries(grad: Tensor) -> Tensor:
    return values_of(coalesced(shard_of(grad)))
