"""Local updates: ranks train on their own and average their parameters now and then."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire import _validate as check
from thinwire._version import __version__
from thinwire.comm import Group, require_agreement
from thinwire.core.fragments import cut
from thinwire.core.message import WIRE_VERSION
from thinwire.core.outer import OuterRule
from thinwire.errors import PayloadCorrupt
from thinwire.sync import local_saving
from thinwire.sync.agreement import Report, agree_on_step
from thinwire.sync.averaging import Averaging, Flight
from thinwire.sync.local_config import AdaptiveLocalSGD, LocalConfig, LocalSGD
from thinwire.sync.local_model import LocalModel
from thinwire.sync.pace import Pace

__all__ = ["LocalUpdates", "local_sgd"]

_open: "list[LocalUpdates]" = []
"""The blocks that have been entered and not been left, in this process."""


def local_sgd(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: LocalConfig,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> "LocalUpdates":
    """Training on every rank alone, with an averaging of the parameters now and then, as a context manager.

    `with local_sgd(model, optimizer, LocalSGD(16)) as sync:` stands around an ordinary training loop.

    Args:
        model: The bare model, the same on all ranks; not wrapped in DistributedDataParallel.
        optimizer: Any optimizer of its parameters that does not exchange by itself. Every call of its `step` counts.
        config: `LocalSGD` or `AdaptiveLocalSGD`.
        process_group: The ranks that average; None for all of them. One process alone works too.

    Returns:
        A context manager. Entering it compares the model over the ranks by name and copies rank 0's parameters and
        floating-point buffers to all; leaving it normally averages once more, and always takes its hooks off.

    Raises:
        TypeError: An argument of another kind; a model or an optimizer that exchanges gradients itself.
        ValueError: More fragments than parameters, or an optimizer of something else.
    """
    return LocalUpdates(model, optimizer, config, process_group=process_group)


class LocalUpdates:
    """What `local_sgd` returns: follows the optimizer's steps and averages when their turn has come.

    **State** in `state_dict`: counters, interval, first loss and rate, anchors, outer momentum, kept errors, a result
    that is on its way, and this rank's own parameters between two averagings. Every rank saves its own.
    **Communication** per averaging: 24 bytes a rank of agreement before and after (more where losses differ), and one
    all-reduce per dtype, or under compression one all-gather of equally long messages. Between two averagings nothing,
    but for the first loss and rate of an adaptive interval.
    **Failure**: an averaging that fails, on whichever rank, changes nothing on any rank but the step counter.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: LocalConfig,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        check.instance("config", config, (LocalSGD, AdaptiveLocalSGD))
        self._tensors = LocalModel(model, optimizer)
        self._config = config
        self._process_group = process_group
        self._parts = _parts(self._tensors, config.fragments)
        self.pace = Pace(config, optimizer)
        self.step = 0
        """Local steps taken."""
        self.synced = False
        """Whether the last step took part in an averaging (with a delay: measured one)."""
        self.last = config.begin_step
        """Step of the last averaging."""
        self.whole = 0
        """Step after which all ranks were equal in everything."""
        self.turn = 0
        """Averagings of single parts so far."""
        self.averagings = 0
        self._bytes_elsewhere = 0
        self.pending: Flight | None = None
        self._group: Group | None = None
        self._averaging: Averaging | None = None
        self._hooks: list[Any] = []

    def __enter__(self) -> "LocalUpdates":
        if self._group is not None:
            raise RuntimeError("this local_sgd block was entered before: make a new one with local_sgd(...)")
        mine = set(map(id, self._tensors.model.parameters()))
        if any(mine & set(map(id, other._tensors.model.parameters())) for other in _open):
            raise RuntimeError(
                "this model is in a local_sgd block already: leave that one first, they cannot be nested"
            )
        self._group = group = Group(self._process_group)
        facts = {"thinwire": __version__, "wire": WIRE_VERSION, "config": type(self._config).__name__}
        facts |= {"settings": asdict(self._config), "misuse": self._tensors.difference(), **self._tensors.facts()}
        require_agreement(group, facts, what="setting up local updates")
        if (problem := self._tensors.difference()) is not None:
            raise RuntimeError(problem)
        self._tensors.copy_from_first(group)
        outer = OuterRule(self._config.outer_lr, self._config.outer_momentum, self._config.outer_nesterov)
        self._averaging = Averaging(group, self._tensors.params, outer=outer, compression=self._config.compression)
        self.restore_bytes(0)  # what it takes to start is not an exchange of updates
        optimizer = self._tensors.optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self.pace.before_step(self.step + 1)),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]
        _open.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._hooks:
                self.flush()
        finally:
            self.close()

    def close(self) -> None:
        """Take the hooks off, without an averaging; may be called twice. Leaving the block does it."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.pending = None
        _open[:] = [other for other in _open if other is not self]

    @property
    def k_steps(self) -> int:
        """The interval in force, in steps."""
        return self.pace.k_steps

    def observe(self, loss: float | Tensor) -> None:
        """Tell the loss of this step: `AdaptiveLocalSGD` needs it before every `optimizer.step()`, `LocalSGD` does not.

        Args:
            loss: This rank's mean loss, unscaled: a number or a tensor of one element, which is not read before it is
                needed. Several before one step are averaged.

        Raises:
            TypeError: No number.
            ValueError: A tensor of more than one element.
        """
        self.pace.observe(loss)

    def skip_step(self) -> None:
        """Count a step whose update this rank drops, for instance because of an overflow; call it instead of `step`.

        Ranks must average at the same step, so a dropped one counts. A loss that is not finite is left out of the mean.
        """
        self.pace.before_step(self.step + 1, dropped=True)
        self._after_step()

    def flush(self) -> None:
        """Apply a result that is on its way, and average everything if there were steps since all ranks were equal.

        All ranks must call it after the same step. Leaving the block does it.

        Raises:
            Mismatch: Ranks are at different steps.
            ThinwireError: As in any averaging.
        """
        self._require_open()
        assert self._group is not None
        agree_on_step(self._group, Report(self.step, "flushing"), [])
        self._land()
        if self.step > self.whole:
            self._average_all("averaging for the last time", with_loss=False)

    def stats(self) -> dict[str, Any]:
        """This rank so far: `step`, `k_steps`, `averagings`, `bytes_sent`, `bytes_dense`, `ratio`.

        `bytes_sent` counts the messages of averagings with their headers and agreements, not the copy of the model at
        the start; `bytes_dense` 4 bytes per trainable element and step.
        """
        sent = 0 if self._group is None else self._group.bytes_sent + self._bytes_elsewhere
        dense = 4 * self._tensors.numel * self.step
        return {
            "step": self.step,
            "k_steps": self.k_steps,
            "averagings": self.averagings,
            "bytes_sent": sent,
            "bytes_dense": dense,
            "ratio": dense / sent if sent else math.inf,
        }

    def state_dict(self) -> dict[str, Any]:
        """All that a later step depends on, of this rank, as plain values and copies of tensors.

        Between two averagings it holds this rank's own parameters and buffers too, since those of rank 0 are copied on
        entry; `load_state_dict` puts them back. The optimizer's state is the optimizer's. No communication.
        """
        return local_saving.saved(self, self._ready(), self._tensors)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of the same rank, bit for bit; inside the block, on all ranks. No communication.

        Raises:
            RuntimeError: The block has not been entered.
            ValueError: The state belongs to another model or config; nothing has changed.
        """
        local_saving.load(state, self, self._ready(), self._tensors)

    def restore_bytes(self, bytes_sent: int) -> None:
        """Count from `bytes_sent` on."""
        assert self._group is not None
        self._bytes_elsewhere = bytes_sent - self._group.bytes_sent

    def _ready(self) -> Averaging:
        self._require_open()
        assert self._averaging is not None
        return self._averaging

    def _require_open(self) -> None:
        if not self._hooks:
            raise RuntimeError("this needs an open local_sgd block: call it inside `with local_sgd(...) as sync:`")

    def _after_step(self) -> None:
        self.step += 1
        self.synced = False
        if self.pending is not None and self.step >= self.pending.step + self._config.delay:
            self._land()
        if self.step <= self._config.begin_step:
            self._average_all("averaging", with_loss=True)
        elif self.step - self.last >= max(1, self.k_steps // self._config.fragments):
            self._take_turn()
        elif self.pace.lacks_start:
            self._agree("first loss", None, [])
        self.pace.forget()

    def _average_all(self, phase: str, *, with_loss: bool) -> None:
        names = list(self._tensors.params)
        flight, reports = self._measure(phase, names, keep=False)
        if with_loss:
            self.pace.read(reports, self.step)
        self._fly(flight)
        self.last = self.whole = self.step
        self.synced = True

    def _take_turn(self) -> None:
        self._land()
        part = self.turn % len(self._parts)
        delayed = self._config.delay > 0
        flight, reports = self._measure(f"averaging part {part}", self._parts[part], keep=delayed)
        k_steps = self.pace.read(reports, self.step, adapt=True)
        if delayed:
            self._ready().launch(flight)
            self.pending = flight
        else:
            self._fly(flight)
            if len(self._parts) == 1:
                self.whole = self.step
        self.pace.k_steps = k_steps
        self.last = self.step
        self.turn += 1
        self.synced = True

    def _measure(self, phase: str, names: list[str], *, keep: bool) -> tuple[Flight, list[Report]]:
        """What this rank would send, once all ranks have agreed that it may be sent."""
        averaging = self._ready()
        problem = self._tensors.difference()
        state = self._tensors.state(names) if self._config.average_state and problem is None else {}
        flight = None
        if problem is None:
            values = {name: self._tensors.params[name] for name in names}
            flight = averaging.measure(self.step, values, {**self._tensors.buffers(), **state}, keep=keep)
            if (culprit := flight.first_not_finite()) is not None:
                problem = f"{culprit} is not finite at the averaging of step {self.step}: lower the learning rate, clip"
                problem += " gradients, or look at the data of that rank"
        reports = self._agree(phase, problem, list(state))
        assert flight is not None
        # a rank whose parameters got no gradient yet has no state to give
        common = set(state).intersection(*(report.state for report in reports))
        flight.extras = {key: v for key, v in flight.extras.items() if key not in state or key in common}
        return flight, reports

    def _agree(self, phase: str, problem: str | None, state: list[str]) -> list[Report]:
        assert self._group is not None
        loss, rate = self.pace.report()
        report = Report(self.step, phase, misuse=problem, loss=loss, rate=rate, state=state)
        reports = agree_on_step(self._group, report, [])
        if phase == "first loss":
            self.pace.read(reports, self.step)
        return reports

    def _fly(self, flight: Flight) -> None:
        """Send, verify, vote, and only then apply."""
        averaging = self._ready()
        assert self._group is not None
        if flight.round is None:
            averaging.launch(flight)
        assert flight.round is not None
        corrupt = None
        try:
            flight.round.finish()
        except PayloadCorrupt as refusal:
            corrupt = str(refusal)
        agree_on_step(self._group, Report(flight.step, "averaged", corrupt=corrupt), [])
        names = list(flight.moved)
        averaging.commit_(flight, {**self._tensors.buffers(), **self._tensors.state(names)})
        self.averagings += 1

    def _land(self) -> None:
        if self.pending is not None:
            flight, self.pending = self.pending, None
            self._fly(flight)


def _parts(tensors: LocalModel, fragments: int) -> list[list[str]]:
    names = list(tensors.params)
    return [[names[i] for i in part] for part in cut([p.numel() for p in tensors.params.values()], fragments)]
