"""One training step under local updates: ranks train on their own and average now and then."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.lab.trainers import Setup, loss_of

__all__ = ["Local"]


@final
class Local:
    """Momentum SGD on every rank, with its momentum kept there, inside `thinwire.local_sgd`.

    Between two averagings no rank's parameters are the model: it is `agreed` right after one, when
    all are equal.
    """

    def __init__(self, model: nn.Module, setup: Setup, **settings: Any) -> None:
        self.module = model
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=0.0, momentum=setup.momentum
        )
        config = _config(settings)
        self.round_steps = (
            config.max_k_steps if isinstance(config, tw.AdaptiveLocalSGD) else config.k_steps
        )
        self.steady_from_step = config.begin_step
        self.settings: Mapping[str, Any] = {**settings, **(settings.get("compression") or {})}
        self.settings = {key: value for key, value in self.settings.items() if key != "compression"}
        self.sync = tw.local_sgd(model, self.optimizer, config).__enter__()
        self.finish_s = 0.0

    @property
    def agreed(self) -> bool:
        """See `Trainer`."""
        return self.sync.synced

    def train_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See `Trainer`."""
        loss = loss_of(self.module, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.sync.observe(loss)
        begin_s = time.perf_counter()
        self.optimizer.step()
        if self.sync.synced:
            self.finish_s = time.perf_counter() - begin_s
        self.optimizer.zero_grad()
        return loss.detach()

    def sent_bytes(self) -> float:
        """See `Trainer`."""
        return float(self.sync.stats()["bytes_sent"])

    def finish(self) -> None:
        """One averaging more, unless the last step ended with one."""
        self.sync.flush()

    def close(self) -> None:
        """See `Trainer`."""
        self.sync.close()


def _config(settings: Mapping[str, Any]) -> tw.LocalSGD | tw.AdaptiveLocalSGD:
    """The config that these settings would be in a strategy file."""
    field = "adaptive_localsgd" if "init_k_steps" in settings else "localsgd"
    config: tw.LocalSGD | tw.AdaptiveLocalSGD = tw.DistributedStrategy.from_dict(
        {field: settings}
    ).on[field]
    return config
