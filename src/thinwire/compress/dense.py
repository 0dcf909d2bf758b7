"""The plain mean: every gradient uncompressed, one all-reduce per dtype.

Small sums are protected: every part travels with a checksum, and all ranks add the parts in the
same order. So a damaged part is detected.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from thinwire._devices import uploaded
from thinwire.compress.protocol import (
    AllGather,
    AllReduce,
    Arrived,
    Collective,
    Context,
    Sending,
    damaged_text,
    salt_of,
)
from thinwire.core.checksum import checked_mean_, checked_sum, with_checksum
from thinwire.core.tensors import state_dtype
from thinwire.errors import PayloadCorrupt
from thinwire.layout.traffic import travels_checksummed


def send_dense(
    context: Context,
    tensors: Mapping[str, Tensor],
    *,
    check_finite: bool = False,
    computed: Mapping[str, Tensor] | None = None,
) -> Sending:
    """Sum dense tensors over the sources; `computed` has the values of some when they are read.

    The mean is sum / W in the dtype of the tensors, float32 for float16. With `check_finite`
    tensors and sums that are not finite are reported.
    """
    groups = by_dtype(tensors)
    finite = {}
    if check_finite and (context.sources == 1 or context.node_size > 1):
        finite = _own_flags(tensors)
    flats = [_filled(g, computed) if computed else joined(g.values()) for g in groups]
    asked = [sum_of(flat, context) for flat in flats]
    answers = yield asked
    arrived = DenseMeans(context, list(tensors))
    arrived.finite = finite
    damaged, sums = [], []
    for group, flat, collective, answer in zip(groups, flats, asked, answers, strict=True):
        total, wrong = opened(collective, answer, flat.dtype, context)
        damaged += [] if wrong is None else [wrong]
        sums.append(checked_mean_(total, context.sources, bits=context.read_sums))
        arrived.means |= parted(uploaded(total, flat.device), group)
    arrived.sums = sums
    arrived.unread = torch.cat(damaged) if damaged else None
    arrived.check_finite = check_finite and context.sources > 1
    return arrived


class DenseMeans(Arrived):
    """Means of whole tensors."""

    def __init__(self, context: Context, names: list[str]) -> None:
        super().__init__(context, names)
        self.means: dict[str, Tensor] = {}
        self.check_finite = False
        """True if a sum that is not finite must be reported."""

    def read(self, numbers: Sequence[int]) -> None:
        at = self.context
        for index, wrong in enumerate(numbers):
            if wrong:
                rank = index % at.sources * at.node_size
                raise PayloadCorrupt(damaged_text(rank, at))

    def first_bad_sum(self) -> str | None:
        if not self.check_finite:
            return None
        return next((name for name, x in self.means.items() if not bool(x.isfinite().all())), None)

    def mean(self, name: str, param: Tensor) -> Tensor:
        """Return the mean over the sources, in the shape of `param` and in its `state_dtype`."""
        mean = self.means[name]
        return mean.to(state_dtype(param)) if param.is_floating_point() else mean


def sum_of(flat: Tensor, context: Context, *, within_node: bool = False) -> Collective:
    """Return the collective that sums a flat tensor, whose parts are on the CPU if gathered."""
    purpose = f"averaging dense tensors of step {context.step}, bucket {context.bucket}"
    if travels_checksummed(flat.nbytes, context.node_size if within_node else context.sources):
        return AllGather(with_checksum(flat.cpu(), salt_of(context)), purpose, within_node)
    return AllReduce(flat, purpose, within_node)


def opened(
    collective: Collective, answer: Tensor, dtype: torch.dtype, context: Context
) -> tuple[Tensor, Tensor | None]:
    """Return the sum that `sum_of` requested, and the damaged parts: int64, 0 for intact ones."""
    if isinstance(collective, AllGather):
        return checked_sum(answer, dtype, salt_of(context))
    return answer, None


def by_dtype(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Group tensors by dtype, so that each group can travel in one buffer.

    >>> by_dtype({"a": torch.zeros(1), "b": torch.zeros(1, dtype=torch.float64)})
    [{'a': tensor([0.])}, {'b': tensor([0.], dtype=torch.float64)}]
    """
    groups: dict[torch.dtype, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.dtype, {})[name] = tensor
    return list(groups.values())


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """Concatenate tensors of one dtype into a copy of shape (n,); float16 becomes float32."""
    # a sum of finite float16 values may exceed 65504, which would look like an overflow
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return flat.float() if flat.dtype == torch.float16 else flat


def _filled(like: Mapping[str, Tensor], computed: Mapping[str, Tensor]) -> Tensor:
    """Return what `joined` does, computing one tensor at a time."""
    first = next(iter(like.values()))
    flat = first.new_empty(sum(tensor.numel() for tensor in like.values()))
    for name, part in parted(flat, like).items():
        part.copy_(computed[name] if name in computed else like[name])
    return flat


def parted(flat: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split the result of `joined` into views by name, in the shapes of `tensors`.

    >>> tensors = {"a": torch.ones(2), "b": torch.zeros(1, 1)}
    >>> parted(joined(tensors.values()), tensors)
    {'a': tensor([1., 1.]), 'b': tensor([[0.]])}
    """
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors.values()])
    return {
        name: piece.view(tensor.shape)
        for (name, tensor), piece in zip(tensors.items(), pieces, strict=True)
    }


def all_finite(tensor: Tensor) -> bool:
    """Return True if all entries are finite."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of dense tensors that are not `all_finite`; one host read if all are.

    >>> not_finite({"a": torch.ones(2), "b": torch.tensor([torch.inf])})
    ['b']
    """
    dense = list(tensors.values())
    on_cpu = all(tensor.is_cpu for tensor in dense)
    # a GPU computes many norms at once; a CPU sums in two thirds of the time
    sums = [tensor.sum() for tensor in dense] if on_cpu else torch._foreach_norm(dense)
    if not sums or bool(torch.stack([total.to(sums[0].device) for total in sums]).isfinite().all()):
        return []
    return [name for name, tensor in tensors.items() if not all_finite(tensor)]


def _own_flags(tensors: Mapping[str, Tensor]) -> dict[str, bool | Tensor]:
    """Return flags of all tensors on other devices, and of those on the CPU that are not finite."""
    waiting: dict[str, bool | Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.is_cpu:
            # the largest magnitude is finite only if all are; it needs no temporary of full size
            largest: Tensor = torch.linalg.vector_norm(tensor, torch.inf)
            waiting[name] = largest.isfinite()
    known = {name: tensor for name, tensor in tensors.items() if name not in waiting}
    return waiting | dict.fromkeys(not_finite(known), False)
