"""Advice on a strategy: settings with little effect, risks, and duties of the training loop."""

from collections.abc import Iterator, Sequence

from thinwire.comm.nodes import job_ranks, node_size_of
from thinwire.compress import COMPRESSIONS, buckets_of
from thinwire.compress.figures import steady_share
from thinwire.compress.protocol import Compression
from thinwire.core.loss_scale import FixedLossScale
from thinwire.local.config import LocalConfig
from thinwire.strategy.explain.texts import TEXTS
from thinwire.strategy.fields import Fields

_NEARLY_ALL = 0.8
"""Share of a change above which advice is left out."""


def advice(strategy: Fields) -> list[str]:
    """Return the advice as one text per item, in the order of the fields."""
    return [
        *_about_amp(strategy),
        *_about_structure(strategy),
        *_about_exchange(strategy),
        *_about_the_end(strategy),
    ]


def _about_amp(strategy: Fields) -> Iterator[str]:
    amp = strategy.amp
    if amp is None:
        return
    if amp.dtype == "float16" and amp.loss_scale is None:
        yield (
            "amp: float16 without a loss scale: gradients below 6e-8 become 0 and large ones "
            "infinite, and amp checks for neither; set loss_scale=DynamicLossScale()"
        )
    if amp.dtype == "bfloat16" and amp.loss_scale is not None:
        yield "amp: bfloat16 has the range of float32; the loss scale is used, but gains little"
    if isinstance(amp.loss_scale, FixedLossScale) and not amp.loss_scale.drop_overflow_update:
        yield (
            "amp: with drop_overflow_update=False an overflow reaches the parameters, unless "
            f"{' or '.join(COMPRESSIONS)} stops it"
        )


def _about_structure(strategy: Fields) -> Iterator[str]:
    if (pipeline := strategy.pipeline) is not None:
        yield (
            f"pipeline: the number of ranks must be a multiple of {pipeline.stages}; ranks / "
            f"{pipeline.stages} replicas train side by side. Every mini-batch must be divisible by "
            f"{pipeline.micro_batches}. The tensors between stages are the traffic: keep them "
            "small. Use train_step, not minimize"
        )
        if strategy.local is None:
            yield (
                "pipeline: gradients are exchanged after the last micro-batch, not during the "
                "backward passes"
            )
        if pipeline.stages == 1:
            yield "pipeline: one stage is no pipeline, only micro-batches"
    if strategy.gradient_merge is not None and strategy.gradient_merge.k_steps == 1:
        yield "gradient_merge: k_steps=1 merges nothing"


def _about_exchange(strategy: Fields) -> Iterator[str]:
    local = strategy.local
    if strategy.compression is not None:
        yield from _about_compression(strategy, strategy.compression)
    if local is None and strategy.pipeline is None:
        first, others = buckets_of(strategy.compression)
        size = _mib(others)
        if first < others:
            size += f" (the first of {_mib(first)})"
        yield (
            f"overlap: gradients are sent during the backward pass, in buckets of {size}, once "
            "all ranks used the same parameters in two successive updates. With one rank, "
            "row-sparse gradients or changing parameters, the exchange follows the backward pass"
        )
    if local is not None:
        yield (
            "local updates: between two averagings every rank has its own parameters; evaluate "
            "after flush()"
        )
        yield from _about_share(local)
    if strategy.localsgd is not None and strategy.localsgd.k_steps == 1:
        yield "localsgd: k_steps=1 averages after every step, which saves no communication"


def _about_share(config: LocalConfig) -> Iterator[str]:
    """Return advice on the applied share of a change, and on the outer rate for it."""
    share = 1.0 if config.compression is None else steady_share(config.compression)
    if share is None:
        yield (
            "local updates: the applied share of a change depends on the ranks' messages: check "
            "stats()['applied_share'], and adjust outer_lr if it is far from 1"
        )
        return
    if share >= _NEARLY_ALL or (not config.outer_momentum and share * config.outer_lr >= 1):
        return
    more = _rounded(1 / share, 3)
    remedy = (
        f"outer_lr={more} compensates for it: divide outer_lr by the stats()['applied_share'] of "
    )
    remedy += "a run"
    if config.outer_momentum:  # longer steps on purpose: the share of a run is no evidence
        remedy = f"{more} times the outer_lr of dense changes compensates for it"
    yield (
        f"local updates: about {_rounded(100 * share, 2)} % or more of a recurring change is "
        f"applied, since the residual decays. At most {remedy}; at decay=1 all of it is applied "
        "eventually"
    )


def _about_compression(strategy: Fields, compression: Compression) -> Iterator[str]:
    """Return the advice of a compression's config, for the sources of this job."""
    local = strategy.local is not None
    stages = 1 if strategy.pipeline is None else strategy.pipeline.stages
    yield from TEXTS[type(compression)].advice(
        compression,
        local=local,
        replaced=strategy.lars is not None or strategy.lamb is not None,
        peers="replicas of a stage" if stages > 1 else "ranks",
        here="" if local else _sources_here(job_ranks()[::stages], compression),
    )


def _sources_here(ranks: Sequence[int], compression: Compression) -> str:
    if len(ranks) == 1:
        return ""
    try:
        width, why = node_size_of(ranks, getattr(compression, "node_size", None))
    except ValueError as error:
        return f". But {error}"
    return (
        f". Here there are {len(ranks) // width} sources of {width} "
        f"{'ranks' if width > 1 else 'rank'}: {why}"
    )


def _about_the_end(strategy: Fields) -> Iterator[str]:
    pending = []
    if strategy.gradient_merge is not None and strategy.gradient_merge.k_steps > 1:
        pending.append("the leftovers of a merge")
    if strategy.local is not None:
        pending.append("the last averaging")
    if pending:
        yield f"at the end call engine.flush(): it applies {' and '.join(pending)}"


def _rounded(value: float, digits: int) -> str:
    return f"{float(f'{value:.{digits}g}'):g}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB"
