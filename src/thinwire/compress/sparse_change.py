"""Sparse changes: the largest entries of every change travel with their positions; the rest is
kept.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.compress.change_protocol import ERRORS, ErrorsOnly, Kept, MeanChange
from thinwire.compress.dgc import DGC
from thinwire.compress.protocol import AllGather, Context, Sending
from thinwire.core.feedback import Proposal
from thinwire.core.merge import divided_, sum_sparse
from thinwire.core.select import top_k
from thinwire.core.sources import source_factors, squared_norms
from thinwire.kernels import is_static
from thinwire.kernels.needs import Need, needs_of
from thinwire.layout.message import VALUE_BITS, Layout, Slot, count_sent
from thinwire.wire.message import pack, unpack

__all__ = ["RampedChange", "Sparse"]


@dataclass(frozen=True)
class Sparse(ErrorsOnly):
    """Only the largest entries of each parameter's change are sent; what stays behind is kept.

    Attributes:
        sparsity: Fraction that is **not** sent, in [0, 1).
        value_bits: What one sent value costs: 1, 2, 4, 8, 16 or 32. The rounding error is kept.
        decay: What is kept counts this much at the next averaging, in [0, 1]; 1 loses nothing, 0
            keeps nothing.
        mean_over: "senders": an entry's mean is over the ranks that sent it; "all": over all ranks.
            An entry that nobody sent stays as it is.
        clip_sources: Largest norm of all that one rank sends at an averaging, as a multiple of the
            median of all ranks' norms, >= 1: what is above is scaled down to it before the mean.
            What this takes off is dropped and not kept: kept, all of it would be applied later.
            Ranks that sent only zeros do not count; of two the smaller norm is the median. None
            limits nothing.

    Raises:
        TypeError, ValueError: A wrong value.

    Source: SparseLoCo, 2025, arXiv 2508.15706, whose formula has the mean over all ranks and whose
    code (templar), CCLoco's too, that over the senders; templar limits the norm of what each rank
    sends of a tensor to the median. Differs: selection per tensor instead of per chunk; one norm
    for all tensors.
    """

    sparsity: float
    value_bits: int = 2
    decay: float = 0.95
    mean_over: Literal["senders", "all"] = "senders"
    _: KW_ONLY
    clip_sources: float | None = None

    def __post_init__(self) -> None:
        named = "sparsity, the fraction that is not sent,"
        sparsity = check.real(named, self.sparsity, at_least=0, below=1)
        value_bits = check.integer("value_bits", self.value_bits)
        check.one_of("value_bits", value_bits, VALUE_BITS)
        decay = check.real("decay", self.decay, at_least=0, at_most=1)
        check.one_of("mean_over", self.mean_over, ("senders", "all"))
        for name, value in (("sparsity", sparsity), ("value_bits", value_bits), ("decay", decay)):
            object.__setattr__(self, name, value)
        if self.clip_sources is not None:
            times = check.real("clip_sources", self.clip_sources, at_least=1)
            object.__setattr__(self, "clip_sources", times)

    @property
    def conserves(self) -> bool:
        """See `ChangeCompression`."""
        return self.decay == 1 and self.mean_over == "all" and self.clip_sources is None

    @property
    def steady_share(self) -> float | None:
        """P / (p + (1 - decay) (1 - p)), with p = 1 - sparsity, of a mean over all ranks.

        That is the share of an entry that is sent at random, with probability p at each averaging.
        Of entries of one size a little more is applied, and more still of the norm where a few
        are much larger than the others.
        """
        if self.mean_over == "senders" or self.clip_sources is not None:
            return None
        sent = 1 - self.sparsity
        return sent / (sent + (1 - self.decay) * self.sparsity)

    def explained(self) -> str:
        """What happens to each tensor's change, in words."""
        bits = "1 bit" if self.value_bits == 1 else f"{self.value_bits} bits"
        over = "the ranks that sent it" if self.mean_over == "senders" else "all ranks"
        said = (
            f"the largest {100 * (1 - self.sparsity):.6g} % are sent, {bits} an entry, whose mean "
            f"is over {over}; the rest is kept and counts {self.decay:g} times the next time"
        )
        if self.clip_sources is not None:
            said += (
                f"; what a rank sends in all is scaled down to {self.clip_sources:g} times the "
                "median norm of the ranks where it is larger, and the difference dropped"
            )
        return said

    def compresses(self, param: Tensor) -> bool:
        """All parameters, whatever their size."""
        return True

    def takes(self, step: int, numel: int) -> bool:
        """At every step."""
        return True

    def send(self, context: Context, folded: Mapping[str, Tensor], kept: Kept) -> Sending:
        """See `ChangeCompression`: one all-gather."""
        return _sent(
            context,
            folded,
            self._count,
            self.value_bits,
            over_senders=self.mean_over == "senders",
            clip_sources=self.clip_sources,
        )

    def sent_bytes(self, step: int, shapes: Sequence[torch.Size]) -> int:
        """See `ChangeCompression`."""
        return _layout([s.numel() for s in shapes], self._count, self.value_bits).nbytes

    def sparsity_at(self, step: int) -> float:
        """At every step the same."""
        return self.sparsity

    def needs(self, params: Sequence[Tensor]) -> frozenset[Need]:
        """See `ChangeCompression`."""
        return needs_of("changes", params, value_bits=self.value_bits)

    def _count(self, numel: int) -> int:
        return count_sent(numel, self.sparsity)


@dataclass(frozen=True)
class RampedChange(ErrorsOnly):
    """Changes that travel by the ramp of a DGC: its sparsity at the step, its `value_bits` and
    `min_numel`.

    The mean is over all ranks and what is kept does not decay, so everything is sent in time, as
    with its gradients.
    """

    dgc: DGC

    decay: ClassVar[float] = 1.0
    conserves: ClassVar[bool] = True
    steady_share: ClassVar[float] = 1.0

    def compresses(self, param: Tensor) -> bool:
        """See `DGC.compresses`."""
        return self.dgc.compresses(param)

    def takes(self, step: int, numel: int) -> bool:
        """Not before the ramp begins."""
        return self.dgc.count_at(step - 1, numel) is not None

    def send(self, context: Context, folded: Mapping[str, Tensor], kept: Kept) -> Sending:
        """See `ChangeCompression`: one all-gather."""
        return _sent(
            context, folded, self._counting(context.step), self.dgc.value_bits, over_senders=False
        )

    def sent_bytes(self, step: int, shapes: Sequence[torch.Size]) -> int:
        """See `ChangeCompression`."""
        return _layout(
            [s.numel() for s in shapes], self._counting(step), self.dgc.value_bits
        ).nbytes

    def sparsity_at(self, step: int) -> float:
        """That of the update that follows `step`."""
        return self.dgc.sparsity_in_force(step)

    def needs(self, params: Sequence[Tensor]) -> frozenset[Need]:
        """See `ChangeCompression`."""
        return needs_of("changes", params, value_bits=self.dgc.value_bits)

    def _counting(self, step: int) -> Callable[[int], int]:
        def count(numel: int) -> int:
            found = self.dgc.count_at(step - 1, numel)
            assert found is not None, "only what is taken is sent"
            return found

        return count


def _layout(numels: Sequence[int], count: Callable[[int], int], value_bits: int) -> Layout:
    return Layout(tuple(Slot(numel, count(numel)) for numel in numels), value_bits)


def _sent(
    context: Context,
    folded: Mapping[str, Tensor],
    count: Callable[[int], int],
    value_bits: int,
    *,
    over_senders: bool,
    clip_sources: float | None = None,
) -> Sending:
    """One message of the largest entries of each tensor."""
    layout = _layout([tensor.numel() for tensor in folded.values()], count, value_bits)
    proposals = [
        _proposed(tensor.view(-1), slot.k)
        for tensor, slot in zip(folded.values(), layout.slots, strict=True)
    ]
    static = is_static(proposals[0].values.device)
    step = context.step
    message, values = (_on_device if static else _on_host)(layout, step, proposals)
    [rows] = yield [AllGather(message, f"gathering changes of step {step}")]
    sent = {name: (p.indices, v) for name, p, v in zip(folded, proposals, values, strict=True)}
    arrived = (_rows_on_device if static else _rows_on_host)(layout, rows, step, clip_sources)
    made = _Largest(context, list(folded))
    made.sent, made.over_senders = sent, over_senders
    made.totals = dict(zip(folded, arrived, strict=True))
    return made


def _proposed(flat: Tensor, k: int) -> Proposal:
    indices = top_k(flat, k)
    return Proposal(indices, flat[indices], finite=True)


def _on_host(
    layout: Layout, step: int, proposals: Sequence[Proposal]
) -> tuple[Tensor, list[Tensor]]:
    return pack(layout, step, 0, [(p.indices, p.values) for p in proposals])


def _on_device(
    layout: Layout, step: int, proposals: Sequence[Proposal]
) -> tuple[Tensor, list[Tensor]]:
    from thinwire.wire import device_message  # needs Triton

    return device_message.pack(layout, step, 0, proposals)


_Total: TypeAlias = Callable[[Tensor, bool], tuple[Tensor, Tensor]]
"""For a tensor like the given one: positions, and the sums over the ranks in their order of what
was sent there, or
of ones, which counts the senders."""


def _rows_on_host(
    layout: Layout, rows: Tensor, step: int, clip_sources: float | None
) -> list[_Total]:
    parts = [
        unpack(layout, row, step=step, bucket=0, source=rank).parts for rank, row in enumerate(rows)
    ]
    if clip_sources is not None:
        factors = source_factors(_squares(layout, parts), clip_sources)
        parts = [[(i, v * f) for i, v in part] for part, f in zip(parts, factors, strict=True)]

    def total(
        came: Sequence[tuple[Tensor, Tensor]], like: Tensor, ones: bool
    ) -> tuple[Tensor, Tensor]:
        return sum_sparse([(i, torch.ones_like(v)) for i, v in came] if ones else came, like.dtype)

    return [partial(total, came) for came in zip(*parts, strict=True)]


def _squares(layout: Layout, parts: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> Tensor:
    """Squared norms of all that the ranks sent, of the bits that `_rows_on_device` finds."""
    found = []
    for slot, came in zip(layout.slots, zip(*parts, strict=True), strict=True):
        padded = [torch.nn.functional.pad(v, (0, slot.k - v.numel())) for _, v in came]
        found.append(squared_norms(torch.stack(padded)))
    return sum(found[1:], found[0])


def _rows_on_device(
    layout: Layout, rows: Tensor, step: int, clip_sources: float | None
) -> list[_Total]:
    from thinwire.wire import device_message  # needs Triton

    arrived = device_message.read(layout, rows, step=step, bucket=0)
    for rank, verdict in enumerate(arrived.verdicts.tolist()):
        if verdict:
            device_message.explain(layout, rows[rank], verdict, step=step, bucket=0, source=rank)
    parts = arrived.parts
    if clip_sources is not None:
        found = [squared_norms(came.values) for came in parts]
        factors = source_factors(sum(found[1:], found[0]), clip_sources).unsqueeze(1)
        parts = [came._replace(values=came.values * factors) for came in parts]

    def total(came: device_message.Rows, like: Tensor, ones: bool) -> tuple[Tensor, Tensor]:
        came = came._replace(values=torch.ones_like(came.values)) if ones else came
        return device_message.sum_rows(came, like.numel(), like.dtype)

    return [partial(total, came) for came in parts]


class _Largest(MeanChange):
    """What all ranks sent of each tensor."""

    sent: Mapping[str, tuple[Tensor, Tensor]]
    """This rank's own, as the others decode it."""
    totals: Mapping[str, _Total]
    over_senders: bool

    def take_mean_(self, name: str, folded: Tensor, kept: Kept) -> Tensor:
        """See `MeanChange`."""
        indices, values = self.sent[name]
        error = kept[ERRORS][name].copy_(folded)
        error.view(-1)[indices] -= values.to(error.dtype)
        positions, mean = self.totals[name](folded, False)
        if self.over_senders:
            mean /= self.totals[name](folded, True)[1].clamp_(
                min=1
            )  # none where nothing was carried on a device
        else:
            divided_(mean, self.context.sources)
        change = torch.zeros_like(folded)
        change.view(-1)[positions] = mean
        return change
