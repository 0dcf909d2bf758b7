"""The exchange of an update, begun while its backward pass still runs: gradients leave bucket by
bucket, the same buckets in the same order on all ranks.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from thinwire.errors import ThinwireError
from thinwire.exchange.gradients import GradientExchange
from thinwire.layout.traffic import BUCKET_BYTES, FIRST_BUCKET_BYTES

__all__ = [
    "Early",
    "Overlap",
    "Readiness",
    "cut_into_buckets",
]


def cut_into_buckets(
    sizes: Mapping[str, int],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    first_bytes: int = FIRST_BUCKET_BYTES,
) -> list[list[str]]:
    """Tensors by bucket, in the reverse of the given order, which is about the order in which
    gradients come.

    A bucket ends with the tensor that fills it, as in DistributedDataParallel, so it may be larger
    by one tensor.

    Args:
        sizes: Bytes of every tensor by name, in the model's order.
        bucket_bytes: Size at which a bucket is full.
        first_bytes: The same for the first bucket, if that is smaller.
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
    """Turns "this tensor is ready" into "launch these buckets": each once, and none before those in
    front of it.

    Ranks become ready in different orders, and collectives must not; so a bucket that is complete
    waits for its turn.

    Args:
        buckets: The tensors of each bucket; no tensor twice.
    """

    def __init__(self, buckets: Sequence[Sequence[str]]) -> None:
        self._place = {name: place for place, names in enumerate(buckets) for name in names}
        self._sizes = [len(names) for names in buckets]
        self.restart()

    def restart(self) -> None:
        """Nothing is ready, nothing is launched."""
        self._missing = list(self._sizes)
        self._ready: set[str] = set()
        self._next = 0

    def mark(self, name: str) -> Iterator[int]:
        """Places of the buckets to launch now, in order; a tensor may be marked again, and an
        unknown one is nothing.

        A bucket counts as launched once its place is given.
        """
        if name in self._place and name not in self._ready:
            self._ready.add(name)
            self._missing[self._place[name]] -= 1
            while self._next < len(self._missing) and self._missing[self._next] == 0:
                self._next += 1
                yield self._next - 1

    def rest(self) -> Iterator[int]:
        """Places of all buckets that were not launched, in order."""
        while self._next < len(self._missing):
            self._next += 1
            yield self._next - 1


Final = Callable[[str, Tensor | None], Tensor | None]
"""From a parameter and what is in its `grad` to the gradient of the update, unscaled and merged;
changes nothing."""


class Early(Protocol):
    """An exchange whose messages can leave before all gradients are there, launched through
    `gradients`.
    """

    @property
    def gradients(self) -> GradientExchange | None:
        """None before the first update."""

    def set_buckets(self, buckets: Sequence[Sequence[str]]) -> None:
        """Which parameters travel together."""

    def place(self, step: int) -> int:
        """Updates made, as `gradients` counts them, when the engine has made `step`."""

    def launching(self) -> contextlib.AbstractContextManager[None]:
        """Around a launch."""


class Overlap:
    """Follows the gradients of one backward pass and launches every bucket whose gradients are
    there.

    All ranks launch the same buckets in the same order, whatever happens: what a rank cannot fill
    goes as zeros, and the vote after it says so; then all ranks exchange anew, after the backward
    pass. Reasons are a parameter without gradient, or with a row-sparse one, or one that changed
    after it was sent (re-entrant checkpointing, a hook).

    **Communication**: the buckets, and 24 bytes a rank of agreement after them, none before.
    **Failure**: an error of this rank in the backward pass is told to all others in that vote, and
    all can go on with the next step. Where it cannot be told (the link is broken, the error came
    while sending, or it asks the process to end), the exchange is abandoned, and the others find
    this rank lost or stalled.

    Args:
        params: What is trained, by name, in the model's order; gets hooks, which `remove` takes
            off.
        exchange: Over more than one rank.
        bucket_bytes: See `cut_into_buckets`.
        first_bytes: Likewise.
    """

    def __init__(
        self,
        params: Mapping[str, Parameter],
        exchange: Early,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        first_bytes: int = FIRST_BUCKET_BYTES,
    ) -> None:
        self._params, self._exchange = dict(params), exchange
        sizes = {name: p.numel() * p.element_size() for name, p in params.items()}
        self._cut = cut_into_buckets(sizes, bucket_bytes=bucket_bytes, first_bytes=first_bytes)
        exchange.set_buckets(self._cut)
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(self._on_gradient, name))  # type: ignore[no-untyped-call]
            for name, p in params.items()
        ]
        self._steady: frozenset[str] = frozenset()
        self._buckets: list[tuple[int, list[str]]] = []
        self._readiness = Readiness(())
        self._pending: _PendingStep | None = None
        self._armed = False
        self._lock = threading.Lock()  # backward passes over several devices run on several threads

    def remove(self) -> None:
        """Take the hooks off; may be called twice."""
        for handle in self._handles:
            handle.remove()

    @property
    def pending(self) -> bool:
        """Whether buckets are on their way."""
        return self._pending is not None

    @contextlib.contextmanager
    def during(self, step: int, final: Final) -> Iterator[None]:
        """Around the backward pass and all that follows until the update is made.

        Args:
            step: Updates made before.
            final: What is sent of each gradient.
        """
        gradients = self._exchange.gradients
        steady = None if gradients is None else gradients.steady
        if gradients is None or not steady or not steady <= self._params.keys():
            yield
            return
        if steady != self._steady:
            buckets = [
                (number, [n for n in names if n in steady])
                for number, names in enumerate(self._cut)
            ]
            self._buckets = [(number, names) for number, names in buckets if names]
            self._readiness = Readiness([names for _, names in self._buckets])
            self._steady = steady
        self._readiness.restart()
        self._pending = _PendingStep(
            gradients, self._exchange.place(step), final, self._readiness, self._buckets
        )
        self._armed = True
        try:
            yield
        except BaseException as error:
            self._armed = False
            if self._pending is not None:
                self._tell(self._pending, error)
            raise
        finally:
            self._armed, self._pending = False, None
            gradients.forget()

    def complete(self) -> None:
        """The backward pass is over: launch the rest. Before gradients are unscaled in place."""
        self._armed = False
        if self._pending is not None:
            for place in self._pending.readiness.rest():
                self._launch(self._pending, place)
            self._pending.look_again(self._params)

    def unusable(self, grads: Mapping[str, Tensor]) -> str | None:
        """Why what was launched does not stand for the gradients of the update, if anything was;
        the exchange follows.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.compare(grads)
        return None if pending is None else pending.unusable

    def _on_gradient(self, name: str, param: Tensor) -> None:
        if not self._armed:
            return
        with self._lock:
            assert self._pending is not None, "armed"
            for place in self._pending.readiness.mark(name):
                self._launch(self._pending, place)

    @torch.no_grad()
    def _launch(self, pending: "_PendingStep", place: int) -> None:
        number, names = pending.buckets[place]
        # an error between here and the end leaves others in a collective that this rank never joins
        pending.launching = True
        grads = {name: pending.gradient(name, self._params[name]) for name in names}
        with self._exchange.launching():
            pending.gradients.launch(pending.step, number, grads)
        pending.launching = False

    @torch.no_grad()
    def _tell(self, pending: "_PendingStep", error: BaseException) -> None:
        """Bring the collectives of this step to their end, so that the others hear of the error and
        can go on.
        """
        self._pending = None
        text = f"{type(error).__name__}: {error}"
        if (
            pending.launching
            or isinstance(error, ThinwireError)
            or not isinstance(error, Exception)
        ):
            pending.gradients.abandon(text)
            return
        try:
            for place in pending.readiness.rest():
                number, names = pending.buckets[place]
                zeros = {n: pending.zeros(n, self._params[n]) for n in names}
                with self._exchange.launching():
                    pending.gradients.launch(pending.step, number, zeros)
            misuse = f"its backward pass ended with {text}"
            pending.gradients.exchange(pending.step, {}, misuse=misuse, again=True)
        except ThinwireError as told:
            if type(told) is not ThinwireError:  # that one is how the others hear of it
                error.add_note(f"while telling the other ranks: {told}")
        except Exception as other:
            error.add_note(f"while telling the other ranks: {other}")
            pending.gradients.abandon(text)


class _PendingStep:
    """One step's early messages, and whether they stand for its gradients."""

    def __init__(
        self,
        gradients: GradientExchange,
        step: int,
        final: Final,
        readiness: Readiness,
        buckets: list[tuple[int, list[str]]],
    ) -> None:
        self.gradients, self.step, self.readiness, self.buckets = (
            gradients,
            step,
            readiness,
            buckets,
        )
        self.launching = False
        """Inside a launch, which may have sent a part of its bucket."""
        self.unusable: str | None = None
        self._final = final
        self._seen: dict[str, tuple[Tensor | None, int]] = {}

    def gradient(self, name: str, param: Parameter) -> Tensor:
        """What is sent of a parameter; zeros, and a reason, where there is nothing dense."""
        grad = param.grad
        self._seen[name] = grad, 0 if grad is None else grad._version
        final = self._final(name, grad)
        if final is not None and not final.is_sparse:
            return final
        self._note(f"parameter {name} has {'no' if final is None else 'a row-sparse'} gradient")
        return self.zeros(name, param)

    def zeros(self, name: str, param: Parameter) -> Tensor:
        """In the place of a gradient, and of its type: each type travels in a collective of its
        own.
        """
        final = self._final(name, torch.zeros_like(param))
        return torch.zeros_like(param, dtype=param.dtype if final is None else final.dtype)

    def look_again(self, params: Mapping[str, Parameter]) -> None:
        """Note a gradient that is another now than when it was sent."""
        for name, (grad, version) in self._seen.items():
            now = params[name].grad
            if now is not grad or (now is not None and now._version != version):
                self._note(f"the gradient of {name} changed after it had been sent")
        self._seen = dict.fromkeys(self._seen, (None, 0))  # the tensors may be large

    def compare(self, grads: Mapping[str, Tensor]) -> None:
        """Note a gradient that was not sent, or was and does not count."""
        for name in grads.keys() ^ self._seen.keys():
            self._note(
                f"parameter {name} has {'a gradient' if name in grads else 'no gradient'}, unlike "
                "before"
            )

    def _note(self, reason: str) -> None:
        self.unusable = self.unusable or reason
