"""Configs of local updates: how often ranks average, and what they send."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

from torch import Tensor

from thinwire import _validate as check
from thinwire.compress import COMPRESSIONS
from thinwire.compress.protocol import Compression
from thinwire.compress.sparse_change import Sparse
from thinwire.layout.shares import contiguous


@dataclass(frozen=True)
class _Common:
    """Methods shared by both configs of local updates."""

    _: KW_ONLY
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    outer_nesterov: bool = False
    compression: Compression | None = None
    fragments: int = 1
    delay: int = 0
    average_state: bool = False
    node_size: int | None = None
    state_device: str | None = None

    def _check(self, interval: str, k_steps: int, begin_step: object) -> None:
        if isinstance(begin_step, Compression):
            raise TypeError(f"begin_step must be an integer: write compression={begin_step}")
        check.set_fields(self, check.integer, "begin_step", at_least=0)
        check.set_fields(self, check.real, "outer_lr", above=0)
        check.set_fields(self, check.real, "outer_momentum", at_least=0, below=1)
        if check.boolean("outer_nesterov", self.outer_nesterov) and self.outer_momentum == 0:
            raise ValueError("outer_nesterov needs an outer_momentum above 0, got outer_momentum=0")
        if self.compression is not None:
            advice = "write None or one of these"
            kinds = tuple(kind for kind in COMPRESSIONS.values() if not kind.accumulates)
            check.instance("compression", self.compression, kinds, advice=advice)
        check.set_fields(self, check.integer, "fragments", at_least=1)
        if self.fragments > k_steps:
            raise ValueError(
                f"fragments must be at most {interval}={k_steps}, got {self.fragments}: one part a "
                "step"
            )
        check.set_fields(self, check.integer, "delay", at_least=0)
        distance = k_steps // self.fragments
        if self.delay >= distance:
            raise ValueError(
                f"delay must be below the {distance} steps between two averagings "
                f"({interval}={k_steps}, fragments={self.fragments}), got {self.delay}"
            )
        if self.node_size is not None:
            check.set_fields(self, check.integer, "node_size", at_least=1)
        check.boolean("average_state", self.average_state)
        if self.state_device is not None:
            check.one_of("state_device", self.state_device, ("cpu",))


@check.by_name
@dataclass(frozen=True)
class LocalSGD(_Common):
    """Train every rank on its own and average the parameters every `k_steps` steps.

    >>> import thinwire as tw
    >>> strategy = tw.DistributedStrategy(localsgd=LocalSGD(k_steps=16, outer_momentum=0.9))

    Attributes:
        k_steps: Local steps between two averagings, >= 1.
        begin_step: Number of first steps that each end with an averaging, >= 0.
        outer_lr: Learning rate of the outer SGD, whose gradient is the averaged change, > 0; 1 is
            plain averaging.
        outer_momentum: Momentum of the outer SGD, in [0, 1).
        outer_nesterov: True for Nesterov momentum in the outer SGD; needs outer_momentum.
        compression: `Sparse` to send only the largest entries of the change, `Quantized` to send
            all entries in a few bits, `LowRank` to send matrices as two thin factors; None sends
            the full change.
        fragments: Number of parts of the model that are averaged in turn, 1 to k_steps; after
            `begin_step` one part is averaged every k_steps // fragments steps. A part is adjacent
            tensors; parts have nearly equal sizes.
        delay: Local steps made while an averaging is in flight, 0 to k_steps // fragments - 1. From
            3 on the first and the last of them hide the agreements before and after the messages,
            which have the others; below 3 they hide the messages alone, as with `round_seconds`.
        average_state: True to average also the optimizer's floating-point tensors of a parameter's
            shape.
        node_size: Consecutive ranks per node, >= 1; it must divide the number of ranks. Ranks of a
            node first average densely among themselves and count as one source. 1 is off. None:
            torchrun's LOCAL_WORLD_SIZE if changes are compressed and ranks fill two nodes or more.
        state_device: "cpu" keeps anchors, outer momentum and residuals in host memory; the same
            bits. None: that of the parameters. It may differ between ranks, a save and a load.
        round_seconds: Seconds after which a rank averages, or `k_steps` steps if they are done
            earlier. Slow ranks make fewer steps in a round, and fast ranks do not wait for them.
            Each change is weighted by the rank's steps, or by its tokens if `observe(tokens=)`
            reports them. `sync.step` advances at averagings only, by the most steps of any rank. A
            fragment is averaged after the fragments' share of the seconds or steps; a result is
            applied after `delay` steps, or their share of the seconds (`delay / k_steps`) if that
            is earlier. Not combinable with nodes, a mean over senders or a pipeline. On a site
            (`mesh=`) the first rank's clock ends the round. None: all ranks make `k_steps` steps
            and count equally.
        node_steps: Steps after which the ranks of a node take the mean of their parameters, in
            full, between two averagings of all; below k_steps. For groups of ranks with a fast
            network inside; `node_size` is given. None: only in averagings of all.

    Raises:
        TypeError, ValueError: A wrong value.

    Source: arXiv 1808.07217; DiLoCo, arXiv 2311.08105 (outer SGD); arXiv 2501.18512 (fragments,
    delay).
    """

    k_steps: int
    begin_step: int = 1
    round_seconds: float | None = field(default=None, kw_only=True)
    node_steps: int | None = field(default=None, kw_only=True)

    @property
    def by_time(self) -> bool:
        """True if rounds end by time, so that ranks make unequal numbers of steps."""
        return self.round_seconds is not None

    def __post_init__(self) -> None:
        check.set_fields(self, check.integer, "k_steps", at_least=1)
        self._check("k_steps", self.k_steps, self.begin_step)
        if self.node_steps is not None:
            check.set_fields(self, check.integer, "node_steps", at_least=1)
            if self.node_size in (None, 1) or self.node_steps >= self.k_steps or self.delay:
                raise ValueError(
                    f"node_steps={self.node_steps} needs a node_size above 1, more k_steps and no "
                    f"delay, got node_size={self.node_size}, k_steps={self.k_steps}, "
                    f"delay={self.delay}: the ranks of a node average between averagings of all"
                )
        if self.round_seconds is None:
            return
        check.set_fields(self, check.real, "round_seconds", above=0)
        if self.node_size not in (None, 1):
            raise ValueError(
                f"round_seconds={self.round_seconds} needs node_size=None or 1, got "
                f"{self.node_size}: the ranks of a node average before they send, so they would "
                "have to end a round together"
            )
        if isinstance(self.compression, Sparse) and self.compression.mean_over == "senders":
            raise ValueError(
                f"round_seconds={self.round_seconds} weights the changes of ranks, but a mean over "
                'senders has no weights: use Sparse(..., mean_over="all")'
            )


@check.by_name
@dataclass(frozen=True)
class AdaptiveLocalSGD(_Common):
    """`LocalSGD` with an interval that follows the loss and the learning rate.

    Call `observe(loss)` before every step.

    >>> import thinwire as tw
    >>> config = AdaptiveLocalSGD(init_k_steps=4, max_k_steps=32)
    >>> strategy = tw.DistributedStrategy(adaptive_localsgd=config)

    Attributes:
        init_k_steps: Interval at the start, 1 to max_k_steps.
        begin_step: Number of first steps that each end with an averaging, >= 0.
        max_k_steps: Largest interval, >= 1.
        outer_lr: See `LocalSGD`.
        outer_momentum: See `LocalSGD`.
        outer_nesterov: See `LocalSGD`.
        compression: See `LocalSGD`.
        fragments: 1 to init_k_steps; see `LocalSGD`.
        delay: 0 to init_k_steps // fragments - 1. If the interval falls below it, a result is
            applied early. The agreement before the messages is waited for, since it decides the
            interval.
        average_state: See `LocalSGD`.
        node_size: See `LocalSGD`.
        state_device: See `LocalSGD`.

    Raises:
        TypeError, ValueError: A wrong value.

    Source: Wang and Joshi, 2018, arXiv 1810.08313.
    """

    init_k_steps: int
    begin_step: int = 1
    max_k_steps: int = 16
    round_seconds: ClassVar[None] = None
    node_steps: ClassVar[None] = None
    by_time: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check.set_fields(self, check.integer, "max_k_steps", "init_k_steps", at_least=1)
        if self.init_k_steps > self.max_k_steps:
            raise ValueError(
                f"init_k_steps must be at most max_k_steps={self.max_k_steps}, got "
                f"{self.init_k_steps}: lower it or give a larger max_k_steps"
            )
        self._check("init_k_steps", self.init_k_steps, self.begin_step)


LocalConfig = LocalSGD | AdaptiveLocalSGD


def fragments_of(params: Mapping[str, Tensor], config: LocalConfig) -> list[list[str]]:
    """Return the names of the parameters of each fragment, in the order of averaging."""
    names = list(params)
    sizes = [p.numel() for p in params.values()]
    return [[names[i] for i in part] for part in contiguous(sizes, config.fragments)]
