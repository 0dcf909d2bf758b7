"""This rank's replica: what must be the same on all ranks, and remain as it was prepared."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from thinwire._names import named_parameters
from thinwire._wording import warn_user
from thinwire.core.sharded import is_sharded, shard_of
from thinwire.core.tensors import coalesced, values_of
from thinwire.errors import Mismatch
from thinwire.exchange.agreement import COMPARING, Answers, Report, Vote, require_equal_sums
from thinwire.exchange.digest import RollingDigest

_LOOKS = 8
"""Number of looks within which every tensor is looked at."""
_ELSEWHERE = ("params", "param_names", "lr", "position")
"""Keys compared at the start, or separately."""


class Replica:
    """Check of settings and state in all agreements, and of the model between them.

    Agreements compare the parameter groups of `optimizer` and the `digest` of state; None for what
    is not compared. `changed` and `warn_of_edits` look at `params` of `model`, an eighth of them at
    a time. `averaged`: True if local updates average them.
    """

    _begun = 0
    """Number of backward passes of all engines of this process."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        digest: RollingDigest | None,
        model: nn.Module | None = None,
        params: Mapping[str, Parameter] | None = None,
        *,
        averaged: bool = False,
    ) -> None:
        self.digest = digest
        self._optimizer = optimizer
        self._averaged = averaged
        self._settings: list[tuple[tuple[Any, ...], str]] = []
        self._model = nn.Module() if model is None else model
        self._params = [(name, p, (p.shape, p.dtype)) for name, p in (params or {}).items()]
        self._sizes = [p.nbytes for _, p, _ in self._params]
        # FSDP replaces the parts of a sharded model
        sharded = any(is_sharded(p) for _, p, _ in self._params)
        self._parts = [
            (own, name, part)
            for module in (() if sharded else self._model.modules())
            for own in (module._parameters, module._modules)
            for name, part in own.items()
        ]
        held = [p for group in self._groups for p in group["params"]]
        self._trained = {p for p in held if p.requires_grad}
        self._idle = [p for p in held if not p.requires_grad]
        self._held = len(held)
        self._looks = -1
        self._here = slice(None)
        self._last = 0
        self._warned = False
        self._grads: list[tuple[str, Parameter, int, int]] = []
        """Name, parameter, identity and version of the gradients that the last update left."""

    def report(self, vote: Vote) -> Report:
        """See `Check`. What rides with the messages knows of the update before only."""
        report: Report = {}
        if self.digest is not None and (vote.last or vote.phase == COMPARING):
            report = self.digest.report()
        if groups := self._groups:
            report["settings"] = self.settings()
            if vote.last:  # some methods have no learning rate
                report["rates"] = [float(group["lr"]) for group in groups if "lr" in group]
        return report

    def judge(self, vote: Vote, answers: Answers) -> None:
        """See `Check`."""
        if self.digest is not None:
            # sums before state: a damaged sum makes the state differ in the next update
            require_equal_sums(vote, answers)
            if any(answers.differences("digest")):
                self.digest.explain(vote.group, vote.step)
            if vote.last:
                self.digest.agreed()
        for first, ours, rank, theirs in answers.differences("rates"):
            raise Mismatch(
                f"{vote.purpose}: the learning rates of the parameter groups are {ours} on rank "
                f"{first} and {theirs} on rank {rank}. Change them on all alike. A rank without "
                "batches cannot call scheduler.step(): use thinwire.schedules inside engine.join()"
            )
        for first, ours, rank, theirs in answers.differences("settings", []):
            _refuse(vote, (first, ours), (rank, theirs))

    def settings(self) -> list[str]:
        """Return a JSON object per group: values by name, written again only after a change."""
        texts = []
        for index, group in enumerate(self._groups):
            values = tuple((key, value) for key, value in group.items() if key not in _ELSEWHERE)
            if index == len(self._settings):
                self._settings.append(((), ""))
            before, text = self._settings[index]
            # write JSON only after a change: this runs in every update
            if not text or not _same(values, before):
                text = json.dumps({key: _text(value) for key, value in sorted(values)})
                self._settings[index] = values, text
            texts.append(text)
        return texts

    def changed(self, *, every: bool) -> str | None:
        """Describe a parameter that would not be exchanged as it was prepared, if any is found.

        One call looks at an eighth of the parameters, or at `every` one. Each call looks for a
        parameter of another size, and for one that the optimizer would update without an exchange.
        """
        self._looks += 1
        # a message of another length than the others' would end this process inside gloo
        every = every or [p.nbytes for _, p, _ in self._params] != self._sizes
        here = self._here = slice(None) if every else slice(self._looks % _LOOKS, None, _LOOKS)
        for name, param, layout in self._params[here]:
            if (param.shape, param.dtype) != layout:
                return layout_change(name, layout, param)
            if self._averaged and not param.requires_grad:
                return (
                    f"parameter {name} was frozen after prepare, but local updates still average "
                    "it. Before you freeze it, call engine.flush() and engine.close(); afterwards "
                    "prepare a new engine, on all ranks"
                )
        if new := self._added():
            names: dict[Tensor, str] = {p: name for name, p in named_parameters(self._model)}
            listed = ", ".join(names.get(p, f"one of shape {tuple(p.shape)}") for p in new[:3])
            return (
                f"{len(new)} parameters became trainable, or were given to the optimizer, after "
                f"prepare had chosen the parameters to exchange: {listed}. Close this engine and "
                "prepare a new one, with an optimizer that has them, on all ranks"
            )
        if all(own.get(name) is part for own, name, part in self._parts[here]):
            return None
        now = set(self._model.parameters())
        known = {part for *_, part in self._parts}
        gone = [name for name, p, _ in self._params if p not in now]
        if not gone or not any(p.requires_grad for p in now - known):
            return None
        return (
            f"the model was changed since prepare: parameter {gone[0]} is another object, which "
            "the optimizer does not train. Copy values into the existing parameters "
            "(load_state_dict without assign=True), or close this engine and prepare a new one "
            "with a new optimizer, on all ranks"
        )

    def _added(self) -> list[Tensor]:
        """Return the parameters that the optimizer trains, and did not train before."""
        groups = self._groups
        same = not any(p.requires_grad for p in self._idle)
        if same and sum(len(group["params"]) for group in groups) == self._held:
            return []
        held = (p for group in groups for p in group["params"])
        return [p for p in held if p.requires_grad and p not in self._trained]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [] if self._optimizer is None else self._optimizer.param_groups

    @contextmanager
    def as_prepared(self) -> Iterator[None]:
        """Give parameters their old shapes in the block: messages must have the old lengths."""
        with ExitStack() as undo:
            for _, param, (shape, dtype) in self._params:
                if (param.shape, param.dtype) != (shape, dtype):
                    undo.callback(setattr, param, "data", param.data)
                    param.data = param.new_zeros(shape, dtype=dtype)
            yield

    def record_gradients(self) -> None:
        """Record gradients as the update left them, where `changed` has looked last."""
        self._last = Replica._begun
        looked = () if self._warned else self._params[self._here]
        # an id and not a reference: a gradient that the user drops must be freed
        self._grads = [
            (name, p, id(grad), grad._version)
            for name, p, _ in looked
            if (grad := p.grad) is not None
        ]

    def warn_of_edits(self) -> None:
        """Warn once if a recorded gradient was edited since, before gradients are cleared."""
        # cleared gradients do not count, nor those of another engine's backward pass, such as a
        # generator's pass through its critic
        only_engine = Replica._begun == self._last
        Replica._begun += 1
        recorded = self._grads
        self._grads = []
        for name, param, *left in recorded if only_engine else ():
            grad = param.grad
            if grad is None or [id(grad), grad._version] == left:
                continue
            if bool(values_of(coalesced(shard_of(grad))).any()):
                self._warned = True
                warn_user(
                    f"the gradient of {name} was changed after engine.minimize or train_step had "
                    "made the update, so the change has no effect. Clip with prepare(..., "
                    "grad_clip=ClipByGlobalNorm(...)) instead of clip_grad_norm_, and pass every "
                    "loss to the engine instead of calling backward(); "
                    "gradient_merge=GradientMerge(k_steps) accumulates several"
                )
                return


def layout_change(name: str, before: tuple[torch.Size, torch.dtype], param: Tensor) -> str:
    """Describe a parameter whose shape or type changed in place."""
    was, now = (
        f"{str(dtype).removeprefix('torch.')} {list(shape)}"
        for shape, dtype in (before, (param.shape, param.dtype))
    )
    return (
        f"parameter {name} was {was} when ranks compared it, and is {now} now. Change a model "
        "before its optimizer is made; after a change make a new optimizer, and a new engine after "
        "close(), on all ranks"
    )


def _refuse(vote: Vote, ours: tuple[int, list[str]], theirs: tuple[int, list[str]]) -> None:
    (first, own), (rank, other) = ours, theirs
    if len(own) != len(other):
        raise Mismatch(
            f"{vote.purpose}: rank {first} has {len(own)} parameter groups and rank {rank} has "
            f"{len(other)}. Add the same groups on all ranks"
        )
    for index, texts in enumerate(zip(own, other, strict=True)):
        here, there = map(json.loads, texts)
        for key in dict.fromkeys([*here, *there]):
            values = [settings.get(key, "missing") for settings in (here, there)]
            if values[0] != values[1]:
                raise Mismatch(
                    f"{vote.purpose}: {key} of parameter group {index} is {values[0]} on rank "
                    f"{first} and {values[1]} on rank {rank}. Use the same hyper-parameters on all "
                    "ranks"
                )


def _same(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Return True if the values are equal and immutable. Mutable values are always read again."""
    plain = all(isinstance(value, int | float | str | tuple | None) for _, value in now)
    return plain and now == before


def _text(value: Any) -> str:
    """Return a text that is equal in two processes for equal values."""
    written = repr(value.tolist()) if isinstance(value, Tensor) else repr(value)
    return re.sub(" at 0x[0-9a-f]+", "", written)
