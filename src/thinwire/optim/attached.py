"""`DGCMomentum.attach`: the exchange in the backward pass of a DistributedDataParallel model."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from thinwire import _validate as check
from thinwire._names import named_parameters
from thinwire.comm import tap_buckets
from thinwire.core.checksum import bit_sums
from thinwire.optim.dgc_settings import DGCSettings
from thinwire.optim.dgc_synchronizer import DGCSynchronizer

_INSTEAD_OF_JOIN = "train with DistributedStrategy(dgc=DGC(...)) inside `with engine.join():`"


class Attached:
    """Handle returned by `DGCMomentum.attach`.

    Example::

        handle = optimizer.attach(DistributedDataParallel(model))
        train(...)
        handle.remove()  # step() exchanges again
    """

    def __init__(
        self,
        optimizer: DGCSettings,
        synchronizer: DGCSynchronizer,
        ddp: DistributedDataParallel,
        *,
        stats: Callable[[], dict[str, float]],
        removed: Callable[[], None],
    ) -> None:
        """See `DGCMomentum.attach`. `stats` are the optimizer's; `remove` calls `removed` once."""
        check.instance("ddp", ddp, DistributedDataParallel)
        if synchronizer.ranks.mesh is not None:
            raise ValueError(
                "attach(ddp) cannot be combined with mesh: a sharded model is not wrapped in "
                "DistributedDataParallel, and step() exchanges"
            )
        optimizer.call_params(_same_params(optimizer, ddp))
        self._optimizer: DGCSettings | None = optimizer
        self._synchronizer, self._stats, self._removed = synchronizer, stats, removed
        self._samples: dict[str, Tensor] = {}
        """Sum of the bits of each launched gradient, by name."""
        self._deferred = False
        """True if buckets wait for `step` because a loss scaler is in use."""
        with synchronizer.ranks.deadline():
            self._exchange = synchronizer.joined()
        group = self._exchange.group
        self._tap = tap_buckets(ddp, group, self._launch, instead=_INSTEAD_OF_JOIN)

    def stats(self) -> dict[str, float]:
        """Return the statistics of the optimizer; see `DGCMomentum.stats`.

        Raises:
            RuntimeError: After `remove`.
        """
        if self._optimizer is None:
            raise RuntimeError("this handle was removed: call optimizer.stats() instead")
        return self._stats()

    def remove(self) -> None:
        """Move the exchange back into `step`, which reads local gradients. May be called twice."""
        if self._optimizer is not None:
            self._tap.close()
            self._optimizer = None
            self._exchange.discard()
            self._removed()

    def unchanged(self, grads: Mapping[str, Tensor], *, scaled: bool) -> dict[str, Tensor] | None:
        """Return for each launched gradient a tensor that is true if it has not changed since; None
        if nothing was launched.

        `scaled`: True if a loss scaler is in use.
        """
        samples, self._samples = self._samples, {}
        if scaled and self._exchange.in_flight:
            self._exchange.discard()  # launched with scaled gradients: drop it
            self._deferred = True
        if not self._exchange.in_flight:
            return None
        names = [name for name in grads if name in samples]
        now = bit_sums([grads[name] for name in names])
        return {name: words == samples[name] for name, words in zip(names, now, strict=True)}

    def _launch(self, bucket: int, params: Sequence[Parameter], grads: Sequence[Tensor]) -> None:
        """Launch the exchange of one bucket; called in the backward pass."""
        optimizer = self._optimizer
        if self._deferred or optimizer is None:
            return
        with torch.no_grad(), self._synchronizer.launching():
            names = self._synchronizer.names
            by_name = {names[p]: grad for p, grad in zip(params, grads, strict=True)}
            self._exchange.launch(optimizer.position, bucket, by_name)
            self._samples.update(zip(by_name, bit_sums(list(by_name.values())), strict=True))


def _same_params(optimizer: DGCSettings, ddp: DistributedDataParallel) -> dict[Tensor, str]:
    """Return the model's names of the optimizer's parameters; raise if the two sets differ."""
    own = {p for p in optimizer._ordered_params() if p.requires_grad}
    theirs: dict[Tensor, str] = {
        p: name for name, p in named_parameters(ddp.module) if p.requires_grad
    }
    if own != theirs.keys():
        missing = [name for p, name in theirs.items() if p not in own]
        raise ValueError(
            "ddp must have exactly the trainable parameters of this optimizer: "
            f"{len(missing)} of the model's are not in the optimizer"
            f"{', such as ' + missing[0] if missing else ''}, "
            f"{len(own - theirs.keys())} of the optimizer's are not in the model"
        )
    return theirs
