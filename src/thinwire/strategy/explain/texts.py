"""Texts on compression methods, in one table by the class of a config."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from thinwire.compress.dgc import DGC
from thinwire.compress.figures import sent_bytes
from thinwire.compress.low_rank import LowRank
from thinwire.compress.quantized_change import Quantized
from thinwire.compress.sparse_change import Sparse
from thinwire.layout.message import Layout
from thinwire.layout.traffic import first_split


class Texts(NamedTuple):
    """Texts on one compression method."""

    change: Callable[[Any], str]
    """Text on the fate of a change of local updates."""
    gradient: Callable[[Any], str] = str
    """Text on the fate of a gradient."""
    message: Callable[[Any, Sequence[Tensor]], str] = lambda config, params: ""
    """Text on one source's message of these gradients, at its final length."""
    advice: Callable[..., Iterator[str]] = lambda *_, **__: iter(())
    """Function that returns advice; arguments as those of `_dgc_advice`."""
    no_shards: str = ""
    """Reason why tensors must be whole; empty if shards work as well."""


def plural(word: str, count: int) -> str:
    """Return the word, with an s unless the count is one."""
    return word if count == 1 else f"{word}s"


def local_clip(config: object, source: str) -> str:
    """Return the text on the local clip of one `source`; empty without."""
    limit = getattr(config, "local_grad_clip_norm", None)
    if limit is None:
        return ""
    return f"; a {source}'s share of a compressed tensor is limited to {limit:g} / sqrt({source}s)"


def _share(sparsity: float) -> str:
    return f"{100 * (1 - sparsity):.6g} %"


def _bits(config: Any) -> str:
    return f"{config.value_bits} {plural('bit', config.value_bits)}"


def _first_dense(updates: int) -> str:
    return f"the first {updates} {plural('update', updates)} dense, then " if updates else ""


def _ramp(dgc: DGC) -> str:
    """Return a text such as "25 % from update 201, 0.1 % from 721", updates counted from 1."""
    levels, length = dgc.sparsity, dgc.rampup_step
    first = [dgc.rampup_begin_step + 1 - (-i * length // len(levels)) for i in range(len(levels))]
    if len(levels) == 1:
        return _share(levels[0])
    ends = [*first[1:], None]
    rows = zip(levels, first, ends, strict=True)
    shown = [(level, start) for level, start, end in rows if start != end]
    return ", ".join(
        f"{_share(level)} {'from update ' if i == 0 else 'from '}{at}"
        for i, (level, at) in enumerate(shown)
    )


def _dgc_gradient(dgc: DGC) -> str:
    stored = ", in bfloat16 by stochastic rounding" if dgc.state_dtype == "bfloat16" else ""
    return (
        f"{_first_dense(dgc.rampup_begin_step)}gradients accumulate, and the largest {_ramp(dgc)} "
        f"of each tensor are sent, {_bits(dgc)} an entry; the rest is kept{stored}. Tensors below "
        f"{dgc.min_numel} numbers are dense{local_clip(dgc, 'source')}"
    )


def _dgc_change(dgc: DGC) -> str:
    return (
        f"{_first_dense(dgc.rampup_begin_step)}the largest {_ramp(dgc)} of each tensor's change "
        f"are sent, {_bits(dgc)} an entry; the rest is kept. Tensors below {dgc.min_numel} "
        "numbers are dense"
    )


def _dgc_message(dgc: DGC, params: Sequence[Tensor]) -> str:
    layout = Layout.of((p.numel() for p in params), dgc.sparsity[-1], dgc.value_bits)
    entries = sum(slot.k for slot in layout.slots)
    text = f"a full message has {entries:,} entries in {layout.nbytes:,} bytes"
    if dgc.exchange != "auto":
        return text
    begin = first_split(layout)
    few = "for any number of sources" if begin is None else f"below {begin}, else they split"
    return f"{text}; sources gather {few}"


def _dgc_advice(dgc: DGC, *, local: bool, replaced: bool, peers: str, here: str) -> Iterator[str]:
    """Return advice on DGC. `replaced`: a method of the strategy replaces the given optimizer."""
    size = dgc.node_size
    if local:
        if size not in (None, 1):
            yield (
                f"dgc: node_size={size} is for gradients; set node_size of the local updates for "
                "their averages"
            )
        return
    if not replaced:
        yield (
            "dgc: clipping, weight decay, momentum and Nesterov of an SGD come before the "
            "exchange; any other optimizer gets the sparse mean as its gradient"
        )
    if size is None:
        text = (
            "dgc: the ranks of a machine average densely and count as one source where "
            "torchrun's LOCAL_WORLD_SIZE ranks fill two machines or more; on one machine every "
            "rank is a source of its own (node_size=None)"
        )
    elif size == 1:
        text = "dgc: every rank is a source of its own, on the same machine or not (node_size=1)"
    else:
        text = (
            f"dgc: {size} consecutive {peers} share a node, average densely and count as one "
            f"source (node_size={size}), so {peers} must be a multiple of {size}; N of a local "
            "clip is the number of nodes"
        )
    yield text + here
    yield _DGC_EXCHANGE[dgc.exchange]


_DGC_EXCHANGE = {
    "gather": "dgc: every source gets the messages of all others, so bytes grow with "
    "sources (exchange='gather')",
    "split": (
        "dgc: every source adds up a share of the numbers and passes on the largest sums "
        "(exchange='split'): two rounds, and no more bytes for more sources; what is not "
        "passed on is kept"
    ),
    "auto": (
        "dgc: few sources gather all messages; from about 9 sources on they add up by shares, if "
        "that moves at most half of the bytes (exchange='auto')"
    ),
}


def _low_rank_gradient(low_rank: LowRank) -> str:
    rank = low_rank.rank
    return (
        f"{_first_dense(low_rank.begin_step)}each gradient of n rows and m columns is sent as two "
        f"factors of {rank} {plural('column', rank)}, {rank} (n + m) numbers in two rounds; the "
        "error is kept and added to the next gradient. Tensors of fewer than two dimensions or "
        f"below {low_rank.min_numel} numbers are dense"
    )


def _low_rank_change(low_rank: LowRank) -> str:
    return f"of each tensor's change {_low_rank_gradient(low_rank).replace('gradient', 'change')}"


def _low_rank_message(low_rank: LowRank, params: Sequence[Tensor]) -> str:
    numbers = sent_bytes(low_rank, 1, [param.shape for param in params]) // 4
    return f"the factors have {numbers:,} numbers, in two rounds"


def _sparse_change(sparse: Sparse) -> str:
    over = "the ranks that sent it" if sparse.mean_over == "senders" else "all ranks"
    return (
        f"the largest {_share(sparse.sparsity)} of each tensor's change are sent, {_bits(sparse)} "
        f"an entry, with the mean over {over}; the rest is kept and counts {sparse.decay:g} times "
        "the next time"
    )


def _quantized_change(quantized: Quantized) -> str:
    return (
        f"every entry of each tensor's change is sent in {_bits(quantized)}; the rounding error "
        f"is kept and counts {quantized.decay:g} times the next time"
    )


TEXTS: dict[type, Texts] = {
    DGC: Texts(_dgc_change, _dgc_gradient, _dgc_message, _dgc_advice),
    LowRank: Texts(
        _low_rank_change,
        _low_rank_gradient,
        _low_rank_message,
        no_shards=(
            "a rank sees some rows of a matrix only. Local updates can compress by LowRank, shard "
            "by shard"
        ),
    ),
    Sparse: Texts(_sparse_change),
    Quantized: Texts(_quantized_change),
}
"""Texts by the class of a config."""
