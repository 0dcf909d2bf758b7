"""Base of the optimizers that exchange gradients themselves."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor

from thinwire.compress.protocol import Compression
from thinwire.core.clip import Clip
from thinwire.exchange.agreement import Among
from thinwire.exchange.gradients import GradientExchange
from thinwire.exchange.round import Round
from thinwire.optim.common import CommonOptimizer

__all__ = ["ExchangingOptimizer"]


class ExchangingOptimizer(CommonOptimizer, ABC):
    """An optimizer whose `step` exchanges gradients itself, and what an engine asks of it.

    It holds the state of the compression, as shards where parameters are sharded. Its constructor
    takes the settings of its config by their names, and `process_group`, `mesh` and `num_trainers`.
    """

    exchanges_gradients = True
    """For those who average parameters instead, and must not do both."""
    method: ClassVar[type[Compression]]
    """The config of the compression that acts inside."""

    @classmethod
    @abstractmethod
    def problem_of_clip(cls, clip: Clip, config: Compression) -> str | None:
        """Why an optimizer with this clipping cannot become such a one, in words."""

    @abstractmethod
    def why_no_clip(self, clip: Clip, *, sharded: bool) -> str | None:
        """Why an engine must not have it clip so, in words; `sharded`: it sees parts of tensors."""

    @property
    @abstractmethod
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that exchange, as given; None for all of them."""

    @property
    @abstractmethod
    def exchange_in_use(self) -> GradientExchange | None:
        """With the other ranks; None before the first step."""

    @abstractmethod
    def joined(self) -> GradientExchange:
        """The exchange with the other ranks, after the comparison that must precede it."""

    @abstractmethod
    def serve(
        self,
        identity: str,
        digest_every: int,
        names: Mapping[Tensor, str],
        among: Among,
    ) -> None:
        """Belong to an engine that calls it and its parameters so, and says who agrees."""

    @abstractmethod
    def set_buckets(self, buckets: Sequence[Sequence[str]]) -> None:
        """Which parameters travel together from now on; the same on all ranks."""

    @abstractmethod
    def compresses(self, param: Tensor) -> bool:
        """Whether this parameter, or this rank's part of it, is compressed once that begins."""

    @abstractmethod
    def one_deadline(self) -> AbstractContextManager[None]:
        """Let all that is waited for inside count against the one time-out of this optimizer."""

    @abstractmethod
    def launching(self) -> AbstractContextManager[None]:
        """Around what is sent before ranks agree."""

    @abstractmethod
    def limited(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of shards within the local clip; all others as they are."""

    @abstractmethod
    def agreed(self) -> None:
        """All ranks have just agreed on the settings of this update."""

    @abstractmethod
    def updating_from(self, done: Round) -> AbstractContextManager[None]:
        """Around a `step` that exchanges nothing, since an engine has done so."""

    @abstractmethod
    def require_equal(self) -> None:
        """Raise `Diverged` on all ranks unless they hold alike what they must."""

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """This rank so far, under the names of `thinwire.core.stats.numbers`."""
