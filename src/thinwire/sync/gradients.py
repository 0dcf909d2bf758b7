"""From what a strategy says about compression to the exchange that does it."""

from collections.abc import Iterable, Mapping
from typing import ClassVar, Protocol

from torch import Tensor

from thinwire import _validate as check
from thinwire.comm import Group, Sources, node_size_of, require_agreement, sources_of
from thinwire.compress.protocol import Compressor
from thinwire.core.kernels.needs import Need
from thinwire.sync.exchange import GradientExchange

__all__ = ["Compression", "gradients_of"]


class Compression(Protocol):
    """A config of compression, such as `DGC`.

    Attributes:
        field: Of a strategy, which says it.
        may_change: Settings that another run may go on with, from a checkpoint of this one.
        node_size: Consecutive ranks that count as one source; None for as many as a machine has.
    """

    field: ClassVar[str]
    may_change: ClassVar[tuple[str, ...]]

    @property
    def node_size(self) -> int | None:
        """See above."""

    def compressor(
        self, params: Mapping[str, Tensor], *, num_trainers: int | None = None
    ) -> Compressor:
        """What does it, for an optimizer that has its momentum and clipping to itself.

        Args:
            params: The trainable parameters by name, in the same order on all ranks.
            num_trainers: By what a local clip is scaled; None: the sources.
        """

    def needs(self, params: Iterable[Tensor]) -> frozenset[Need]:
        """The compiled loops that it calls."""

    def explanation(self) -> str:
        """What becomes of a gradient, in words."""

    def why_dense(self, param: Tensor) -> str | None:
        """Why this tensor is never compressed, in words; None where it is."""

    def message_text(self, params: Iterable[Tensor]) -> str:
        """What one source sends of these tensors, in words."""

    def sparsity_in_force(self, step: int) -> float:
        """Fraction of a compressed tensor that update `step` (from 0) does not send."""


def gradients_of(
    group: Group,
    params: Mapping[str, Tensor],
    compression: Compression | None = None,
    *,
    num_trainers: int | None = None,
    check_finite: bool = True,
) -> GradientExchange:
    """The exchange of gradients for an optimizer that does not exchange.

    Args:
        group: The ranks. Names, shapes, dtypes and `compression` must have been compared over them.
        params: The trainable parameters by name, in the same order on all ranks.
        compression: How to compress; None for the dense mean.
        num_trainers: See `Compression.compressor`.
        check_finite: Whether a dense gradient that is not finite drops the step.

    Communication: where nodes are to be found, one comparison of their size, and the making of
    their groups.
    """
    if num_trainers is not None:
        check.integer("num_trainers", num_trainers, at_least=1)
    if compression is None:
        return GradientExchange(group, params, check_dense=check_finite)
    compressor = compression.compressor(params, num_trainers=num_trainers)
    return GradientExchange(
        group, params, [compressor], sources=_agreed_sources(group, compression.node_size)
    )


def _agreed_sources(group: Group, node_size: int | None) -> Sources:
    """Who counts as one source, once all ranks have said the same."""
    width, _ = node_size_of(group.global_ranks, node_size)
    if node_size is None:  # else it is a part of the config
        require_agreement(group, {"ranks of a node": width}, what="comparing nodes")
    return sources_of(group, width)
