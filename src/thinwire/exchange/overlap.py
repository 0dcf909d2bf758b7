"""Exchange of an update that begins while its backward pass still runs.

Gradients are sent bucket by bucket, the same buckets in the same order on all ranks.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from thinwire.errors import ThinwireError
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

    def rest(self) -> Iterator[int]:
        """Yield the indices of all buckets that were not launched, in order."""
        while self._next < len(self._missing):
            self._next += 1
            yield self._next - 1


Final = Callable[[str, Tensor | None], Tensor | None]
"""Maps a parameter's name and its `grad` to the gradient of the update, unscaled and merged. It
changes nothing.
"""


class Overlap:
    """Follows the gradients of one backward pass and launches every bucket that is ready.

    All ranks launch the same buckets in the same order, in any case. A rank that cannot fill a
    bucket (a gradient is missing, row-sparse, or changed after it was sent) sends zeros and says so
    in the vote which follows; all ranks then exchange again. **Failure**: that vote also reports an
    error in the backward pass, and all ranks can continue. Where this rank cannot report it, the
    exchange is abandoned, and the others see a rank that is lost or stalled.
    """

    def __init__(
        self,
        params: Mapping[str, Parameter],
        gradients: GradientExchange,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        first_bytes: int = FIRST_BUCKET_BYTES,
    ) -> None:
        self._params, self._gradients = dict(params), gradients
        sizes = {name: p.numel() * p.element_size() for name, p in params.items()}
        self._cut = cut_into_buckets(sizes, bucket_bytes=bucket_bytes, first_bytes=first_bytes)
        gradients.buckets = self._cut
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(self._on_gradient, name))  # type: ignore[no-untyped-call]
            for name, p in params.items()
        ]
        self._pending: _PendingStep | None = None
        self._armed = False
        self._lock = threading.Lock()  # autograd runs one thread per device

    def remove(self) -> None:
        """Remove the hooks. May be called twice."""
        for handle in self._handles:
            handle.remove()

    @property
    def pending(self) -> bool:
        """True if buckets are in flight."""
        return self._pending is not None

    @contextlib.contextmanager
    def during(self, step: int, final: Final) -> Iterator[None]:
        """Return the context of the backward pass and all that follows until the update."""
        gradients, steady = self._gradients, self._gradients.steady
        # not steady yet, or a parameter without a hook: exchange after the backward pass
        if not steady or not steady <= self._params.keys():
            yield
            return
        # only agreed tensors are launched, so buckets lose the others
        agreed = [[name for name in names if name in steady] for names in self._cut]
        buckets = [(number, names) for number, names in enumerate(agreed) if names]
        self._pending = _PendingStep(gradients, step, final, buckets)
        self._armed = True
        try:
            yield
        except BaseException as error:
            self._armed = False
            if self._pending is not None:
                self._report(self._pending, error)  # before the error leaves: the others wait
            raise
        finally:
            self._armed, self._pending = False, None
            gradients.forget()

    def complete(self) -> None:
        """Launch the rest after the backward pass, before gradients are unscaled in place."""
        # hooks are off: this thread launches the remaining buckets
        self._armed = False
        if self._pending is not None:
            for index in self._pending.readiness.rest():
                self._launch(self._pending, index)
            # after all launches: a hook may have changed a gradient behind its bucket
            self._pending.check_unchanged(self._params)

    def unusable(self, grads: Mapping[str, Tensor]) -> str | None:
        """Return why the launched messages do not match the gradients; the exchange must follow."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.compare(grads)
        return None if pending is None else pending.unusable

    def _on_gradient(self, name: str, param: Tensor) -> None:
        if not self._armed:
            return
        # the order of launches must be that of the buckets, on every thread
        with self._lock:
            assert self._pending is not None, "armed"
            for index in self._pending.readiness.mark(name):
                self._launch(self._pending, index)

    @torch.no_grad()
    def _launch(self, pending: "_PendingStep", index: int) -> None:
        number, names = pending.buckets[index]
        # after an error in this section other ranks wait in a collective that this rank never joins
        pending.launching = True
        grads = {name: pending.gradient(name, self._params[name]) for name in names}
        pending.gradients.launch(pending.step, number, grads)
        # reached only if the whole bucket was launched
        pending.launching = False

    @torch.no_grad()
    def _report(self, pending: "_PendingStep", error: BaseException) -> None:
        """Finish the collectives of this step, so that the others receive the error."""
        # no hook may launch any more
        self._pending = None
        text = f"{type(error).__name__}: {error}"
        # the others can no longer be reached by a vote: they see this rank as lost
        unsaid = pending.launching or isinstance(error, ThinwireError)
        if unsaid or not isinstance(error, Exception):
            pending.gradients.abandon(text)
            return
        # the others launch all buckets and vote: do the same with zeros, and report the error there
        try:
            for index in pending.readiness.rest():
                number, names = pending.buckets[index]
                zeros = {n: pending.zeros(n, self._params[n]) for n in names}
                pending.gradients.launch(pending.step, number, zeros)
            user_error = f"its backward pass ended with {text}"
            pending.gradients.exchange(pending.step, {}, user_error=user_error, again=True)
        except ThinwireError as reported:
            if type(reported) is not ThinwireError:  # raised on all ranks by this report itself
                error.add_note(f"while reporting it to the other ranks: {reported}")
        except Exception as other:
            error.add_note(f"while reporting it to the other ranks: {other}")
            pending.gradients.abandon(text)


class _PendingStep:
    """Messages of one step that were launched early, and whether they match its gradients."""

    def __init__(
        self,
        gradients: GradientExchange,
        step: int,
        final: Final,
        buckets: list[tuple[int, list[str]]],
    ) -> None:
        self.gradients, self.step, self.buckets = gradients, step, buckets
        self.readiness = Readiness([names for _, names in buckets])
        self.launching = False
        """True inside a launch, which may have sent a part of its bucket."""
        self.unusable: str | None = None
        self._final = final
        self._seen: dict[str, tuple[Tensor | None, int]] = {}

    def gradient(self, name: str, param: Parameter) -> Tensor:
        """Return the tensor to send for a parameter; without a dense gradient zeros, and a note."""
        grad = param.grad
        # torch counts writes into a tensor, so a later change shows without a copy
        self._seen[name] = grad, 0 if grad is None else grad._version
        final = self._final(name, grad)
        if final is not None and not final.is_sparse:
            return final
        self._note(f"parameter {name} has {'no' if final is None else 'a row-sparse'} gradient")
        return self.zeros(name, param)

    def zeros(self, name: str, param: Parameter) -> Tensor:
        """Return zeros of the gradient's type. Each type travels in a collective of its own."""
        final = self._final(name, torch.zeros_like(param))
        return torch.zeros_like(param, dtype=param.dtype if final is None else final.dtype)

    def check_unchanged(self, params: Mapping[str, Parameter]) -> None:
        """Note a gradient that differs from the one that was sent."""
        for name, (grad, version) in self._seen.items():
            now = params[name].grad
            if now is not grad or (now is not None and now._version != version):
                self._note(f"the gradient of {name} changed after it had been sent")
        self._seen = dict.fromkeys(self._seen, (None, 0))  # release the tensors, which may be large

    def compare(self, grads: Mapping[str, Tensor]) -> None:
        """Note a gradient that was not sent, or one that was sent and does not count."""
        for name in grads.keys() ^ self._seen.keys():
            self._note(
                f"parameter {name} has {'a gradient' if name in grads else 'no gradient'}, unlike "
                "before"
            )

    def _note(self, reason: str) -> None:
        self.unusable = self.unusable or reason
