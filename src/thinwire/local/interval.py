"""When local updates average: by steps and seconds, at a fixed interval or an adapted one."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum, IntEnum, auto
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import ThinwireError
from thinwire.exchange.agreement import Answers
from thinwire.layout.traffic import AGREEING_DELAY
from thinwire.local.config import AdaptiveLocalSGD, LocalConfig
from thinwire.local.steps import RoundWork


class Interval:
    """Interval, the losses observed since the last step, and loss and rate at the start."""

    def __init__(self, config: LocalConfig, optimizer: torch.optim.Optimizer) -> None:
        self._adaptive = config if isinstance(config, AdaptiveLocalSGD) else None
        self._optimizer = optimizer
        self.observed: list[float | Tensor] = []
        """Losses observed since the last step."""
        self.last: float | Tensor | None = None
        self._rate = 0.0
        self._dropped = False
        if isinstance(config, AdaptiveLocalSGD):
            self.k_steps, self.longest = config.init_k_steps, config.max_k_steps
        else:
            self.k_steps = self.longest = config.k_steps
        self.first_loss: float | None = None
        self.first_rate: float | None = None
        if self._adaptive is not None and "lr" not in optimizer.param_groups[0]:
            raise ValueError(
                "AdaptiveLocalSGD needs an optimizer whose first group has a learning rate `lr`; "
                "use LocalSGD"
            )

    def allowed(self, k_steps: int) -> int:
        """Return the interval of a loaded state, within the limits of the config."""
        return self.longest if self._adaptive is None else min(k_steps, self.longest)

    def observe(self, loss: float | Tensor) -> None:
        """Implement `LocalUpdates.observe`."""
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise ValueError(f"loss must be of one element, got shape {tuple(loss.shape)}")
            if loss.dtype == torch.bool or loss.is_complex():
                raise TypeError(f"loss must be a real number, got a tensor of type {loss.dtype}")
            loss = loss.detach()
        elif isinstance(loss, bool) or not isinstance(loss, (int, float, np.floating)):
            raise TypeError(f"loss must be a number or a tensor of one element, got {loss!r}")
        self.last = loss
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
        if rate and (self.first_loss is None or self.first_rate is None):
            self.first_loss = loss
            self.first_rate = rate
        if not (rate and adapt) or self.first_loss is None or self.first_rate is None:
            return self.k_steps
        return adapted_interval(self._adaptive, (self.first_loss, self.first_rate), (loss, rate))


@dataclass(slots=True)
class Counters:
    """Progress of local updates; the same on all ranks."""

    last: int
    """Step of the last averaging."""
    step: int = 0
    """Local steps taken."""
    last_full_sync: int = 0
    """Step of the last full sync: all ranks were equal in everything after it."""
    fragments_averaged: int = 0
    """Averagings of single fragments so far; selects the next fragment."""
    averagings: int = 0
    """Averagings so far."""
    batch: int = 0
    """Microbatches of an update over all members in their first round; 0 before its end."""
    members: int = 1
    """Members of the present round, as agreed on before it."""


INTERVAL = ("k_steps", "first_loss", "first_rate")
"""State of an `Interval` that is the same on all ranks."""


class Due(Enum):
    """What follows a local step."""

    NOTHING = auto()
    FIRST_LOSS = auto()
    NODE = auto()
    FRAGMENT = auto()
    EVERYTHING = auto()


class Stage(IntEnum):
    """Progress of an averaging."""

    PROPOSED = auto()
    """Ranks agree to send it."""
    AGREED = auto()
    SENT = auto()
    ARRIVED = auto()
    """All messages are here and sound; ranks vote on it."""
    VERIFIED = auto()
    APPLIED = auto()


class Timetable:
    """When to average: decided from counts of steps and a clock, without tensors or messages."""

    def __init__(self, config: LocalConfig, optimizer: torch.optim.Optimizer) -> None:
        self.config = config
        self.interval = Interval(config, optimizer)
        self.counters = Counters(last=config.begin_step)
        seconds = config.round_seconds
        self.work = None if seconds is None else RoundWork(seconds, config.fragments)
        """Work of this rank in a timed round; None if rounds are counted in steps."""
        self.of_site: Callable[[bool], bool] = lambda over: over
        """Makes the clock of a site's first rank count for its other ranks."""
        self.paced_step = 0
        """Step after the last round whose time was taken."""
        self.synced = False
        """True if the last step took part in an averaging (with a delay: was measured for one)."""
        self.overlaps = config.delay >= AGREEING_DELAY and self.work is None
        """True if local steps continue while ranks agree on an averaging."""
        self.merge_steps, self.keep_batch = 1, False
        """Microbatches of a local step, and True if they follow the number of members."""

    @property
    def microbatches(self) -> int:
        """Return the microbatches of this rank in a local step."""
        kept = self.keep_batch and self.counters.batch
        return -(-kept // self.counters.members) if kept else self.merge_steps

    @property
    def batch_share(self) -> float:
        """Return the microbatches of an update over all members, over those at the start."""
        at = self.counters
        return self.microbatches * at.members / at.batch if at.batch else 1.0

    @property
    def unsynced(self) -> bool:
        """True if this rank made steps since the last full sync."""
        begun = self.work is not None and self.work.steps > 0
        return begun or self.counters.step > self.counters.last_full_sync

    def state(self) -> dict[str, Any]:
        """Return what is the same on all ranks, by name."""
        return asdict(self.counters) | {key: getattr(self.interval, key) for key in INTERVAL}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, by name."""
        for key in asdict(self.counters):
            setattr(self.counters, key, state[key])
        for key in INTERVAL:
            setattr(self.interval, key, state[key])
        self.paced_step = self.counters.step

    @property
    def fragment(self) -> int:
        """Fragment that is averaged next: the counter is equal on all ranks, and so is this."""
        return self.counters.fragments_averaged % self.config.fragments

    def count_step(self) -> None:
        """Count a step. In a timed round `Counters.step`, equal on all ranks, moves later."""
        self.synced = False
        if self.work is None:
            self.counters.step += 1
        else:
            self.work.step()

    def stage(self, measured: int) -> Stage:
        """Return the stage that an averaging measured at this step must have reached by now."""
        # the step alone decides what is launched: in the same order on all ranks, whoever is late
        delay = self.config.delay
        if self.work is not None:
            over = self._over(self.work, delay, delay / self.interval.k_steps)
            return Stage.APPLIED if over else Stage.PROPOSED
        steps = self.counters.step - measured
        if steps >= delay:
            return Stage.APPLIED
        if not self.overlaps:
            return Stage.PROPOSED
        return Stage.ARRIVED if steps == delay - 1 else Stage.SENT

    def due(self) -> Due:
        """Return what follows the last step."""
        if self.work is None:
            begins = self.counters.step <= self.config.begin_step
            return Due.EVERYTHING if begins else self.due_by_steps()
        begins = self.counters.step < self.config.begin_step
        over = begins or self._over(self.work, self._part_steps, 1 / self.config.fragments)
        return self.due_at_end() if over else Due.NOTHING

    def due_at_end(self) -> Due:
        """Return what follows the end of a timed round."""
        begins = self.counters.step < self.config.begin_step
        return Due.EVERYTHING if begins else Due.FRAGMENT

    def due_by_steps(self) -> Due:
        """Return what follows by the steps since the last averaging."""
        if self.counters.step - self.counters.last >= self._part_steps:
            return Due.FRAGMENT
        node_steps = self.config.node_steps
        if node_steps and self.counters.step % node_steps == 0:
            return Due.NODE
        adaptive = isinstance(self.config, AdaptiveLocalSGD)
        begins = adaptive and self.interval.first_loss is None  # at a positive rate
        return Due.FIRST_LOSS if begins else Due.NOTHING

    def work_report(self, part: int | None = None) -> tuple[int, int, int | None] | None:
        """Return the steps of this timed round, and the work on a fragment or the whole model."""
        return None if self.work is None else (self.work.steps, *self.work.totals(part))

    def begin_round(self, step: int, part: int | None) -> None:
        """Start the next timed round at the step on which all ranks agreed."""
        if self.work is not None:
            self.counters.step = step
            self.work.begin(part)

    @property
    def _part_steps(self) -> int:
        return max(1, self.interval.k_steps // self.config.fragments)

    def _over(self, work: RoundWork, most_steps: int, share: float) -> bool:
        """Return True after `most_steps` steps or `share` of the seconds on the site's clock."""
        over = work.over(most_steps, share)
        return over if work.steps >= most_steps else self.of_site(over)


def adapted_interval(
    config: AdaptiveLocalSGD, first: tuple[float, float], now: tuple[float, float]
) -> int:
    """Return the next interval: ceil(sqrt((lr0 F) / (lr F0)) * init_k_steps), from 1 to the most.

    `now` is the mean loss F >= 0 and the rate lr > 0, `first` F0 and lr0, those at the start.

    Source: Wang and Joshi, 2018, arXiv 1810.08313, section 4. Differs: guards where a loss is 0.
    """
    (first_loss, first_rate), (loss, rate) = first, now
    if first_loss == 0:
        return config.init_k_steps
    above, below = first_rate * loss, rate * first_loss
    if below > 0 and math.isfinite(above) and math.isfinite(below):
        root = math.sqrt(above / below)
    else:  # a product overflowed or underflowed; the quotients may not
        root = math.sqrt(first_rate / rate) * math.sqrt(loss / first_loss)
    wanted = root * config.init_k_steps
    return config.max_k_steps if wanted >= config.max_k_steps else max(1, math.ceil(wanted))
