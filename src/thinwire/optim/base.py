"""The common part of all optimizers, once: one update from its rates to its end, and what
is saved.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

# torch.compiler.disable imports the compiler at once, for a second
from torch._compile import _disable_dynamo

from thinwire import _validate as check
from thinwire.compress.protocol import Compression
from thinwire.core.centralize import centralized
from thinwire.core.clip import Clip, clipped
from thinwire.core.decay import decayed
from thinwire.core.rows import coalesced
from thinwire.core.sharded import is_sharded, shard_of
from thinwire.exchange.agreement import Among
from thinwire.exchange.gradients import GradientExchange
from thinwire.exchange.round import Round
from thinwire.optim.grouped import ParamFacts
from thinwire.optim.rates import rate_ahead
from thinwire.optim.saving import laid_out, packed, restoring
from thinwire.optim.two_phase import ParamGrad, TwoPhase
from thinwire.schedules import rate_at

__all__ = ["CommonOptimizer", "ExchangingOptimizer", "ParamFacts"]


class CommonOptimizer(TwoPhase):
    """Base of every optimizer here, beside torch's own class or `torch.optim.Optimizer` itself.

    A constructor makes three calls: `groups, rate = self._open(params, lr, ...)`, then torch's
    constructor with `groups` and the number `rate`, then `self._close()`; that of `OwnOptimizer`,
    the base of methods that are not torch's, makes all three.

    One update runs in `step`: rates of this update (errors come before anything changes),
    collection of the (param, grad) pairs in order, negated under `maximize`, `_update`, and only if
    that returns True one more completed update.

    A subclass defines:
        `_update(pairs, rates) -> bool`: the update. `pairs` is the ordered list of (param, grad),
        possibly empty (it is called all the same); gradients are read only. `rates[i]` is the rate
        of `param_groups[i]`. False: the update was dropped and nothing changed; the position stays.
        `_check_hyperparameters(values)`: called with the constructor's values and with every
        group's. `_check_param(name, param)`: called for every parameter. `_check_rate(rate,
        where)`: called for every rate ahead of an update.

    and finds:
        `_ordered_params()`: all parameters, in the order of `order_params` or of the groups.
        `_facts(param)`: name, group, effective weight decay, regularizer, centralization, as
        `ParamFacts`. `_with_decay(param, grad)`: weight decay (where it is coupled), regularizer
        and centralization, on a copy; `grad` itself if there is nothing to do.
        `_processed(pairs)`: clip, then `_with_decay`, for all pairs at once: the order of the other
        optimizers. `grad_clip`: the config; `position`: completed updates, from 0, the step of
        every schedule. `_wide_state`: whether floating-point state keeps float32 for narrower
        parameters when it is loaded. `_as_loaded(param, value)`: floating-point state that was
        loaded, in the type and layout that it has here. `_extra_state()`,
        `_read_extra_state(saved)`, `_set_extra_state(values)`: further plain values of the
        state_dict; extend all three with super(). `_step_supports_amp_scaling`: torch's; a subclass
        that sets it finds `grad_scale` and `found_inf` in `_update`.

    **State**: torch's `state` and `param_groups`, and `position`. Schedules, `grad_clip`,
    exclusions and the order are arguments: they are copied and pickled with the optimizer, but are
    not in the state_dict.
    """

    _wide_state = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update from the gradients in `p.grad`, which stay as they are.

        Args:
            closure: Computes the loss and its gradients again; called once, with gradients enabled.

        Returns:
            What `closure` returned, or None.

        Raises:
            IndexError: A list of rates has ended; nothing has changed.
            ValueError: The rate is negative or not finite; nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.set_grad_enabled(bool(self.defaults.get("differentiable", False))):
            self._step_untraced()
        return loss

    # a trace would freeze the counters and rates that change from update to update
    @_disable_dynamo
    def _step_untraced(self) -> None:
        """Make one update, or one that moves nothing where somebody has set all rates to 0, as
        torch's `get_optimizer_state_dict` does to have the state made.
        """
        if not any(group["lr"] for group in self.param_groups) and any(
            rate_ahead(schedule, self._common.position, 0.0)
            for schedule in self._common.schedules
            if schedule is not None
        ):
            self._check_rate(0.0, "the learning rate, which somebody has set to 0,")
            self._run_update([0.0] * len(self.param_groups))
        elif self._run_update(self._rates()):
            self._common.position += 1
            self._show_rates()

    def _run_update(self, rates: list[float]) -> bool:
        return self._update(self._collected(), rates)

    def _update(self, pairs: list[ParamGrad], rates: list[float]) -> bool:
        """Update the parameters of `pairs`; False if the update was dropped."""
        raise NotImplementedError(f"{type(self).__name__} must define _update(pairs, rates)")

    def _rates(self) -> list[float]:
        """The rate of every group in this update; schedules write theirs into the groups."""
        position = self._common.position
        rates = []
        for i, (group, schedule) in enumerate(
            zip(self.param_groups, self._common.schedules, strict=True)
        ):
            decay = group["weight_decay"]
            if type(decay) is not float or not 0 <= decay < math.inf:  # a user may have written it
                check.scalar(f"weight_decay of group {i} at step {position}", decay, at_least=0)
            where = f"the learning rate of group {i} at step {position}"
            rate = (
                check.scalar(where, _without_rounding(group["lr"]), at_least=0)
                if schedule is None
                else rate_at(schedule, position)
            )
            self._check_rate(rate, where)
            rates.append(rate)
        for group, schedule, rate in zip(
            self.param_groups, self._common.schedules, rates, strict=True
        ):
            if schedule is not None:
                group["lr"] = rate
        return rates

    def _show_rates(self) -> None:
        """Let driven groups show the rate of the next update."""
        for group, schedule in zip(self.param_groups, self._common.schedules, strict=True):
            if schedule is not None:
                group["lr"] = rate_ahead(schedule, self._common.position, group["lr"])

    def begin_at(self, position: int) -> None:
        """Go on as after so many updates: the step at which schedules are read. For a member that
        comes to a run which has made them.
        """
        self._common.position = position
        self._show_rates()

    def _collected(self) -> list[ParamGrad]:
        """The pairs of this update, in order; gradients negated where the group maximizes."""
        pairs = self._given
        if pairs is None:
            pairs = [
                (p, p.grad)
                for p in self._ordered_params()
                if p.grad is not None and p.requires_grad
            ]
        return [(p, -g if self._group_of(p).get("maximize") else g) for p, g in pairs]

    def _coupled_decay(self, facts: ParamFacts) -> float:
        """The weight decay that goes through the gradient; 0 where the method has decay in its own
        formula.
        """
        return facts.weight_decay

    def _with_decay(self, param: Tensor, grad: Tensor) -> Tensor:
        """Coupled decay, regularizer and centralization, on a copy; `grad` itself where there is
        nothing to do.
        """
        facts = self._facts(param)
        here = param if is_sharded(grad) else shard_of(param)
        grad = decayed(
            grad, here, weight_decay=self._coupled_decay(facts), regularizer=facts.regularizer
        )
        return centralized(grad) if facts.grad_centralization else grad

    def _processed(self, pairs: Sequence[ParamGrad]) -> list[ParamGrad]:
        """Clip over all pairs, then decay, regularizer and centralization; copies, where there is
        something to do.
        """
        params = [p for p, _ in pairs]
        grads = [coalesced(g) for _, g in pairs]
        if self.grad_clip is not None:
            grads = self._clipped(params, grads, self.grad_clip)
        return [(p, self._with_decay(p, g)) for p, g in zip(params, grads, strict=True)]

    def _clipped(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], clip: Clip
    ) -> list[Tensor]:
        # the global norm is summed in the order of the groups, so that order_params changes no bit
        ranking = sorted(range(len(params)), key=lambda i: self._common.places[params[i]].index)
        new = clipped(clip, [grads[i] for i in ranking])
        return [
            grad for _, grad in sorted(zip(ranking, new, strict=True), key=lambda entry: entry[0])
        ]

    def _extra_state(self) -> dict[str, Any]:
        """Plain values that the state_dict holds beside torch's."""
        return {"position": self._common.position}

    def _read_extra_state(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The values that `_extra_state` gave, checked; nothing changes yet."""
        if "position" not in saved and self.has_schedule:
            raise ValueError(
                "the state_dict has no 'position', and a schedule drives the rate; set "
                "state_dict['position'] to the number of updates that were made"
            )
        return {
            "position": check.integer(
                "state_dict['position']", saved.get("position", 0), at_least=0
            )
        }

    def _set_extra_state(self, values: Mapping[str, Any]) -> None:
        """Take over what `_read_extra_state` returned; cannot fail."""
        self._common.position = values["position"]

    def _as_loaded(self, param: Tensor, value: Tensor) -> Tensor:
        """State of `param` that was loaded, as this optimizer keeps it."""
        return laid_out(param, value)

    def state_dict(self) -> dict[str, Any]:
        """Torch's dictionary of plain values and tensors, and `position`, the completed updates."""
        return {**packed(super().state_dict()), **self._extra_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave; one of torch's class of the same name is taken too.

        Floating-point state of this library's own methods keeps float32 (float64 for float64
        parameters). Where named parameters were given, then and now, names decide whose state it
        is, in any order of groups and parameters.

        Raises:
            ValueError: The groups do not fit, or the position is missing while a schedule drives
                the rate.
        """
        as_loaded = self._as_loaded if self._wide_state else None
        with restoring(self, self._read_extra_state, self._set_extra_state, as_loaded, self._label):
            super().load_state_dict(state_dict)
        self._show_rates()


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


def _without_rounding(rate: Any) -> Any:
    """0 for what a scheduler of torch leaves where it means 0, such as `LinearLR` with
    end_factor=0: it multiplies the rate before by a quotient in every step.
    """
    return 0.0 if isinstance(rate, float) and -1e-12 < rate < 0 else rate
