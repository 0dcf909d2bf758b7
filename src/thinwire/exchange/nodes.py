"""Averaging inside nodes: ranks of a node count as one source and hold one state."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from thinwire._devices import uploaded
from thinwire.comm import Group, Sources, require_agreement
from thinwire.compress.dense import by_dtype, joined, opened, parted, sum_of
from thinwire.compress.protocol import Bucket, Context, Sending, combined, damaged_text
from thinwire.core.checksum import checksum
from thinwire.errors import PayloadCorrupt

Send = Callable[[Context, Mapping[str, Tensor]], Sequence[Sending]]
"""Makes the sendings of one bucket, from the means over a node if there are any."""


def make_common_(state: Mapping[str, Mapping[str, Tensor]], sources: Sources) -> None:
    """Give all ranks of each node the mean of their `state`, by kind and name, unless equal."""
    if sources.node_size == 1:
        return
    # it differs where it was saved with every rank as a source of its own, or with other ranks. The
    # mean preserves the pending update, which is the mean over all ranks
    named = {f"{kind} of {name}": t for kind, held in state.items() for name, t in held.items()}
    facts = {"state of": [f"{name} {list(tensor.shape)}" for name, tensor in named.items()]}
    require_agreement(sources.all_ranks, facts, action="comparing the state inside the nodes")
    make_mean_(list(named.values()), sources.node, action="averaging the state inside the node")


@torch.no_grad()
def make_mean_(tensors: Sequence[Tensor], group: Group, *, action: str) -> None:
    """Replace tensors that differ between the ranks by their mean, on all of them or none."""
    if not tensors or group.size == 1:
        return
    sums = b"".join(checksum([tensor]).to_bytes(8, "little") for tensor in tensors)
    rows = group.gather_bytes(sums, action=action)
    # equal answers on all ranks, so all of them enter the all-reduces or none does
    cuts = [slice(at, at + 8) for at in range(0, len(sums), 8)]
    differ = [
        tensor
        for tensor, cut in zip(tensors, cuts, strict=True)
        if len({row[cut] for row in rows}) > 1
    ]
    pending = [group.all_reduce_(_copy(tensor), action=action) for tensor in differ]
    means = [total.wait().div_(group.size) for total in pending]
    if differ:
        group.gather_bytes(b"", action=action)  # none is overwritten before all ranks have all
    for tensor, mean in zip(differ, means, strict=True):
        tensor.copy_(mean)


def _copy(tensor: Tensor) -> Tensor:
    dtype = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


def in_nodes(context: Context, grads: Iterable[tuple[str, Tensor]], send: Send) -> Bucket:
    """Average the gradients of a node's ranks densely, then make its sendings from the means."""
    dense = {name: grad.to_dense() if grad.is_sparse else grad for name, grad in grads}
    groups = by_dtype(dense)
    parts = [joined(group.values()) for group in groups]
    # first step of the bucket: sums inside the node, one per dtype
    asked = [sum_of(part, context, within_node=True) for part in parts]
    answers = yield asked
    means: dict[str, Tensor] = {}
    refusal: PayloadCorrupt | None = None
    for group, part, collective, answer in zip(groups, parts, asked, answers, strict=True):
        # the mean is bit-identical on all ranks of the node
        total, wrong = opened(collective, answer, part.dtype, context)
        means |= parted(uploaded(total.div_(context.node_size), part.device), group)
        for rank, damage in enumerate([] if wrong is None else wrong.tolist()):
            if damage and refusal is None:
                text = damaged_text(rank, context)
                refusal = PayloadCorrupt(
                    f"inside node {context.source}, whose ranks count from 0: {text}"
                )
    # send even after damage: the other nodes wait for this one's messages
    arrived = yield from combined(send(context, {name: means[name] for name in dense}))
    if refusal is not None:
        raise refusal
    for brought in arrived:
        # residuals are taken from the mean of the node, which is what it sent
        brought.node_means = {name: means[name] for name in brought.names}
    return arrived
