"""Averaging interval of local updates: fixed, or adapted to loss and learning rate."""

import math

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import ThinwireError
from thinwire.exchange.agreement import Answers
from thinwire.local.config import AdaptiveLocalSGD, LocalConfig


class Interval:
    """Interval, the losses observed since the last step, and loss and rate at the start."""

    def __init__(self, config: LocalConfig, optimizer: torch.optim.Optimizer) -> None:
        self._adaptive = config if isinstance(config, AdaptiveLocalSGD) else None
        self._optimizer = optimizer
        self.observed: list[float | Tensor] = []
        """Losses observed since the last step."""
        self._rate = 0.0
        self._dropped = False
        self.k_steps = (
            config.init_k_steps if isinstance(config, AdaptiveLocalSGD) else config.k_steps
        )
        self._fixed = self.k_steps
        self.longest = self.k_steps if self._adaptive is None else self._adaptive.max_k_steps
        self.first_loss: float | None = None
        self.first_rate: float | None = None
        if self._adaptive is not None and "lr" not in optimizer.param_groups[0]:
            raise ValueError(
                "AdaptiveLocalSGD needs an optimizer whose first group has a learning rate `lr`; "
                "use LocalSGD"
            )

    def allowed(self, k_steps: int) -> int:
        """Return the interval of a loaded state, within the limits of the config."""
        return self._fixed if self._adaptive is None else min(k_steps, self._adaptive.max_k_steps)

    @property
    def lacks_start(self) -> bool:
        """True if an adaptive interval still waits for its first loss at a positive rate."""
        return self._adaptive is not None and self.first_loss is None

    def observe(self, loss: float | Tensor) -> None:
        """Implement `LocalUpdates.observe`."""
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise ValueError(
                    "loss must be a number or a tensor of one element, got shape "
                    f"{tuple(loss.shape)}"
                )
            if loss.dtype == torch.bool or loss.is_complex():
                raise TypeError(f"loss must be a real number, got a tensor of type {loss.dtype}")
            loss = loss.detach()
        elif isinstance(loss, bool) or not isinstance(loss, (int, float, np.floating)):
            raise TypeError(f"loss must be a number or a tensor of one element, got {loss!r}")
        if self._adaptive is not None:
            self.observed.append(loss)

    def before_step(self, step: int, *, dropped: bool = False) -> None:
        """Record the rate that the update will use; refuse one without a loss to follow."""
        self._dropped = dropped
        if self._adaptive is None:
            return
        if not self.observed and not dropped:
            raise RuntimeError(
                f"step {step} has no loss: AdaptiveLocalSGD needs sync.observe(loss) before every "
                "optimizer.step()"
            )
        get_lr = getattr(self._optimizer, "get_lr", None)
        self._rate = float(get_lr() if callable(get_lr) else self._optimizer.param_groups[0]["lr"])

    def report(self) -> tuple[float | None, float | None]:
        """Return this rank's loss and rate of the step for the others, None where it has none."""
        if self._adaptive is None:
            return None, None
        if not self.observed:
            return None, self._rate
        loss = sum(float(one) for one in self.observed) / len(self.observed)
        return None if self._dropped and not math.isfinite(loss) else loss, self._rate

    def forget(self) -> None:
        """Clear the losses at the end of a step."""
        self.observed.clear()

    def read(self, answers: Answers, step: int, *, adapt: bool = False) -> int:
        """Return the interval by all ranks' losses and rank 0's rate, if it may `adapt`."""
        if self._adaptive is None:
            return self.k_steps
        losses = [loss for _, loss in answers.of("loss")]
        rate = answers[0].get("rate")
        assert rate is not None
        if not (math.isfinite(rate) and rate >= 0):
            raise ThinwireError(
                f"the learning rate of step {step} is {rate} on rank 0: it must be finite and >= 0"
            )
        if not losses:
            return self.k_steps
        loss = sum(losses) / len(losses)
        if not (math.isfinite(loss) and loss >= 0):
            raise ThinwireError(
                f"the mean loss of step {step} over the ranks is {loss} (by rank: "
                f"{[report.get('loss') for report in answers]}): AdaptiveLocalSGD needs a finite "
                "loss >= 0. Nothing was averaged on any rank"
            )
        if rate == 0:
            return self.k_steps
        if self.first_loss is None or self.first_rate is None:
            self.first_loss, self.first_rate = loss, rate
        if not adapt:
            return self.k_steps
        return adapted_interval(
            self._adaptive.init_k_steps,
            self._adaptive.max_k_steps,
            loss=loss,
            first_loss=self.first_loss,
            rate=rate,
            first_rate=self.first_rate,
        )


def adapted_interval(
    init_k_steps: int,
    max_k_steps: int,
    *,
    loss: float,
    first_loss: float,
    rate: float,
    first_rate: float,
) -> int:
    """Return the steps until the next averaging: ceil(sqrt((lr0 F) / (lr F0)) * init_k_steps), at
    least 1 and at most `max_k_steps`.

    F >= 0 and lr > 0 are mean loss and rate now, F0 and lr0 those at the start.

    Source: Wang and Joshi, 2018, arXiv 1810.08313, section 4. Differs: guards where a loss is 0.
    """
    if first_loss == 0:
        return init_k_steps
    above, below = first_rate * loss, rate * first_loss
    if below > 0 and math.isfinite(above) and math.isfinite(below):
        root = math.sqrt(above / below)
    else:  # a product overflowed or underflowed; the quotients may not
        root = math.sqrt(first_rate / rate) * math.sqrt(loss / first_loss)
    wanted = root * init_k_steps
    return max_k_steps if wanted >= max_k_steps else max(1, math.ceil(wanted))
