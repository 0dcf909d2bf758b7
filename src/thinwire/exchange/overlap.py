"""Exchange of an update that begins while its backward pass still runs.

Gradients are sent bucket by bucket, the same buckets in the same order on all ranks.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from thinwire.exchange.gradients import GradientExchange
from thinwire.layout.traffic import BUCKET_BYTES, FIRST_BUCKET_BYTES


def cut_into_buckets(
    sizes: Mapping[str, int],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    first_bytes: int = FIRST_BUCKET_BYTES,
) -> list[list[str]]:
    """Assign tensors to buckets, in the reverse of the given order.

    >>> cut_into_buckets({"a": 60, "b": 50, "c": 50}, bucket_bytes=100, first_bytes=10)
    [['c'], ['b', 'a']]
    """
    buckets: list[list[str]] = []
    room = 0
    for name, nbytes in reversed(list(sizes.items())):
        if room <= 0:
            room = bucket_bytes if buckets else min(first_bytes, bucket_bytes)
            buckets.append([])
        buckets[-1].append(name)
        room -= nbytes
    return buckets


class Readiness:
    """Turns "this tensor is ready" into "launch these buckets", each once and in order: a complete
    bucket waits until all buckets before it have been launched.

    >>> ready = Readiness([["c"], ["b", "a"]])
    >>> [list(ready.mark(name)) for name in ("a", "b", "c")]
    [[], [], [0, 1]]
    """

    def __init__(self, buckets: Sequence[Sequence[str]]) -> None:
        self._bucket_of = {name: index for index, names in enumerate(buckets) for name in names}
        self._missing = [len(names) for names in buckets]
        self._ready: set[str] = set()
        self._next = 0

    def mark(self, name: str) -> Iterator[int]:
        """Yield the indices of the buckets to launch now, in order."""
        if name in self._bucket_of and name not in self._ready:
            # a hook may run twice for a parameter (re-entrant checkpointing)
            self._ready.add(name)
            self._missing[self._bucket_of[name]] -= 1
            while self._next < len(self._missing) and self._missing[self._next] == 0:
                self._next += 1
                yield self._next - 1


Final = Callable[[str, Tensor | None], Tensor | None]
"""Maps a parameter's name and its `grad` to the gradient of the update, unscaled and merged. It
changes nothing.
"""


class Overlap:
    """Follows the gradients of one backward pass and launches every bucket that is ready.

    All ranks launch the same buckets in the same order, in any case; the exchange that follows
    launches the others. A bucket that does not match the gradients afterwards (one is missing,
    row-sparse, or changed after it was sent) is reported in it; all ranks then exchange again.
    """

    def __init__(
        self,
        params: Mapping[str, Parameter],
        gradients: GradientExchange,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        first_bytes: int = FIRST_BUCKET_BYTES,
    ) -> None:
        self._params = dict(params)
        self._gradients = gradients
        sizes = {name: p.numel() * p.element_size() for name, p in params.items()}
        gradients.buckets = cut_into_buckets(
            sizes, bucket_bytes=bucket_bytes, first_bytes=first_bytes
        )
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(self._on_gradient, name))  # type: ignore[no-untyped-call]
            for name, p in params.items()
        ]
        self.begun = False
        """True from `begin` to `end` if buckets are launched before ranks agree."""
        self.launching = False
        """True inside a launch, which may have sent a part of its bucket."""
        self.unusable: str | None = None
        """Why the buckets that were launched do not match the gradients."""
        self._armed = False
        self._lock = threading.Lock()  # autograd runs one thread per device

    def remove(self) -> None:
        """Remove the hooks. May be called twice."""
        for handle in self._handles:
            handle.remove()

    @property
    def applies(self) -> bool:
        """True if all ranks launch buckets before they agree: all steady gradients have a hook."""
        steady = self._gradients.steady
        return steady is not None and bool(steady) and steady <= self._params.keys()

    def begin(self, step: int, final: Final) -> None:
        """Begin an update whose gradients are launched in the backward pass, once steady."""
        if not self.applies:
            return
        self._step = step
        self._final = final
        self._buckets = self._gradients.steady_buckets
        self._readiness = Readiness([names for _, names in self._buckets])
        self._seen: dict[str, tuple[Tensor | None, int]] = {}
        self.unusable = None
        self.begun = self._armed = True

    def stop(self) -> None:
        """End the launches, after the backward pass, and before gradients change in place."""
        self._armed = False
        if not self.begun:
            return
        for name, (grad, version) in self._seen.items():
            now = self._params[name].grad
            # a hook may have changed a gradient behind its bucket
            if now is not grad or (now is not None and now._version != version):
                self._note(f"the gradient of {name} changed after it had been sent")
        self._seen.clear()  # release the tensors, which may be large

    def end(self) -> None:
        """End the update, made or not."""
        self._armed = self.begun = self.launching = False
        self._gradients.forget()

    def _on_gradient(self, name: str, param: Tensor) -> None:
        if not self._armed:
            return
        # the order of launches must be that of the buckets, on every thread
        with self._lock:
            for index in self._readiness.mark(name):
                self._launch(*self._buckets[index])

    @torch.no_grad()
    def _launch(self, number: int, names: Sequence[str]) -> None:
        # after an error in this section other ranks wait in a collective that this rank never joins
        self.launching = True
        grads = {name: self._gradient(name) for name in names}
        self._gradients.launch(self._step, number, grads)
        # reached only if the whole bucket was launched
        self.launching = False

    def _gradient(self, name: str) -> Tensor:
        """Return the tensor to send for a parameter; without a dense gradient zeros, and a note."""
        grad = self._params[name].grad
        # torch counts writes into a tensor, so a later change shows without a copy
        self._seen[name] = grad, 0 if grad is None else grad._version
        final = self._final(name, grad)
        presence = self._gradients.presence
        if final is not None and presence.fits(name, final):
            return final
        self._note(f"parameter {name} has {'no' if final is None else 'another'} gradient")
        return presence.zeros(name)

    def _note(self, reason: str) -> None:
        self.unusable = self.unusable or reason
